"""The watchdog of the driver's waits: reports what a long wait is for and the status of each process; may end the run.

Status queries never hang: a process that does not respond within seconds is reported as unresponsive. The supervisor
runs the watchdog in every wait; the caller supplies the report (`WaitTarget`). Actors return `RankStatus` or
`RolloutStatus`, which `format_rank_status` and `format_rollout_status` format as text.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError

from slimrl.arguments import Arguments
from slimrl.engines.server_protocol import ServerLoad
from slimrl.rollout.generation.sample_tracker import ActiveSample

logger = logging.getLogger("slimrl")

ANSWER_TIMEOUT_S = 5.0


class WatchdogTimeoutError(RuntimeError):
    """A wait reached --watchdog-limit-seconds; the message has the wait's target and the status of all processes."""


@dataclasses.dataclass(frozen=True)
class WaitTarget:
    """What a wait is for, such as "training on rollout 7".

    `describe(pending)` returns the status of the processes whose calls have not returned; `pending` are the indices of
    these calls in the list that is waited for.
    """

    what: str
    describe: Callable[[Sequence[int]], str]


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
    """The flags of the watchdog."""

    report_after_s: float
    limit_s: float | None

    @classmethod
    def from_args(cls, args: Arguments) -> WatchdogConfig:
        """--watchdog-report-seconds and --watchdog-limit-seconds."""
        return cls(args.watchdog_report_seconds, args.watchdog_limit_seconds)


class Wait:
    """One wait: `look` as often as you like, at least when `remaining` seconds have passed."""

    def __init__(
        self, config: WatchdogConfig, target: WaitTarget, report_suffix: Callable[[], str] = lambda: ""
    ) -> None:
        """`report_suffix()` returns what other processes know about the cause of the wait, or ""."""
        self._report_suffix = report_suffix
        self._config = config
        self._target = target
        self._started = time.monotonic()
        self._next_report_s = config.report_after_s

    def remaining(self) -> float | None:
        """Seconds until `check` has something to do; None if never."""
        times = [time_s for time_s in (self._next_report_s, self._config.limit_s) if time_s]
        return max(min(times) - self._waited(), 0.0) if times else None

    def check(self, pending: Sequence[int]) -> None:
        """Logs the status of the `pending` calls when a report is due; the interval doubles after each report.

        Raises WatchdogTimeoutError with the report when the limit is reached.
        """
        waited, limit = self._waited(), self._config.limit_s
        too_long = limit is not None and waited >= limit
        if not too_long and (not self._next_report_s or waited < self._next_report_s):
            return
        others = self._report_suffix()
        report = f"waiting {waited:.0f} s for {self._target.what}: {self._target.describe(pending)}"
        report += f"; {others}" if others else ""
        if too_long:
            raise WatchdogTimeoutError(f"{report}; the run ends (--watchdog-limit-seconds {limit:g})")
        logger.warning("%s", report)
        self._next_report_s *= 2

    def _waited(self) -> float:
        return time.monotonic() - self._started


def poll_actors(refs: Sequence[ObjectRef]) -> list[Any | None]:
    """The result of each call; None if it does not return within a few seconds or its actor is dead."""
    ready = set(ray.wait(list(refs), num_returns=len(refs), timeout=ANSWER_TIMEOUT_S)[0])
    return [_result(ref) if ref in ready else None for ref in refs]


def _result(ref: ObjectRef) -> Any | None:
    try:
        return ray.get(ref)
    except RayActorError:  # its watch reports the cause
        return None


_SHOWN_STAGES = 5
_SHOWN_IDS = 16
_SILENT_S = 4.0


@dataclasses.dataclass(frozen=True)
class RankStatus:
    """One training rank. `seconds` since its last message; `frames` innermost first (`process_info.frames_of`)."""

    rank: int
    pid: int | None
    node: str
    method: str | None  # None: it waits for the next call
    micro_batch: int
    micro_batches: int
    seconds: float
    state: str
    frames: list[str]
    log: str

    @property
    def place(self) -> str:
        """Its position in the current call, without its identity."""
        if self.method is None:
            return "done"
        if self.micro_batches and self.micro_batch < self.micro_batches:
            return f"in micro-batch {self.micro_batch} of {self.micro_batches}"
        return f"in its last micro-batch, {self.micro_batch}" if self.micro_batches else f"in {self.method}"


@dataclasses.dataclass(frozen=True)
class RolloutStatus:
    """The rollout manager's phase, progress and unfinished samples; `blocked_line` is a line of code or ""."""

    doing: str
    finished: int
    expected: int
    samples: list[ActiveSample]
    in_flight: int
    blocked_line: str
    servers: list[ServerLoad]
    log: str


def format_rank_status(ranks: Sequence[RankStatus | None], pending: Sequence[int], kind: str = "rank") -> str:
    """The ranks grouped by position: unresponsive ranks first, then the furthest behind first.

    `kind` is what they are called.
    """
    unresponsive = [rank for rank in pending if ranks[rank] is None]
    known = [status for rank in pending if (status := ranks[rank]) is not None]
    known.sort(key=lambda status: (status.state != "stopped", status.micro_batch, -status.seconds))
    groups: dict[tuple[str, str], list[RankStatus]] = {}
    for status in known:
        groups.setdefault((status.place, status.state), []).append(status)
    parts = [f"{_counted(kind, unresponsive)} does not answer: no reply from its actor"] if unresponsive else []
    parts += [_group(kind, place, state, members) for (place, state), members in groups.items()]
    done = [rank for rank in range(len(ranks)) if rank not in pending]
    return "; ".join(parts + ([f"{_counted(kind, done)} done"] if done else []))


def _group(kind: str, place: str, state: str, members: Sequence[RankStatus]) -> str:
    first = members[0]
    alone = f"{kind} {first.rank} (pid {first.pid} on {first.node})"
    label = alone if len(members) == 1 else _counted(kind, _numbers(members))
    stopped = "" if state in ("running", "sleeping") else f", process {state}"
    at = f", at {first.frames[0]}{_slimrl_frame(first.frames)}" if first.frames else ""
    return f"{label} {place} for {first.seconds:.0f} s{stopped}{at} (stacks in {first.log})"


def _slimrl_frame(frames: Sequence[str]) -> str:
    """The innermost frame of slimrl, as ", called from ..."; "" if it is the innermost of all or absent."""
    own = next((frame for frame in frames if "/slimrl/" in frame), None)
    return f", called from {own}" if own is not None and own != frames[0] else ""


def _numbers(members: Sequence[RankStatus]) -> list[int]:
    return sorted(status.rank for status in members)


def _counted(what: str, numbers: Sequence[int]) -> str:
    """ "rank 3", or "ranks 0, 1, 2 and 5 more"."""
    shown = ", ".join(map(str, numbers[:_SHOWN_IDS]))
    more = f" and {len(numbers) - _SHOWN_IDS} more" if len(numbers) > _SHOWN_IDS else ""
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}{more}"


def format_rollout_status(status: RolloutStatus | None) -> str:
    """The rollout manager's status as text."""
    if status is None:
        return "the rollout manager does not answer: no reply from its actor"
    parts = [status.doing] if status.doing else []
    if status.blocked_line:
        parts.append(
            f"its event loop is blocked at {status.blocked_line}: a function there must not wait without await"
            f" (stacks in {status.log})"
        )
    if status.expected:
        parts.append(f"{status.expected - status.finished} of {status.expected} samples unfinished")
    parts += _samples(status.samples, status.blocked_line)
    if status.servers:
        parts.append(f"{status.in_flight} requests in flight; " + ", ".join(map(_server, status.servers)))
    return "; ".join(parts)


def _samples(samples: Sequence[ActiveSample], blocked_line: str) -> list[str]:
    """The samples by stage and line, slowest first; of a blocked loop only the sample that blocks it, if any does."""
    chosen = [sample for sample in samples if blocked_line and sample.line == blocked_line] or samples
    groups: dict[tuple[str, str], list[ActiveSample]] = {}
    for sample in chosen:
        groups.setdefault((sample.stage, sample.line), []).append(sample)
    shown, others = list(groups.items())[:_SHOWN_STAGES], list(groups.values())[_SHOWN_STAGES:]
    parts = [_in_stage(stage, line, members) for (stage, line), members in shown]
    return parts + ([f"{sum(map(len, others))} more elsewhere"] if others else [])


def _in_stage(stage: str, line: str, members: Sequence[ActiveSample]) -> str:
    label = _counted("sample", [sample.index for sample in members])
    return f"{label} in {stage} for {members[0].seconds:.0f} s" + (f" at {line}" if line else "")


def _server(server: ServerLoad) -> str:
    if server.running is None or server.seconds is None:
        return f"server {server.url} does not answer"
    load = f"server {server.url} runs {server.running} and queues {server.waiting}"
    silent = server.running + (server.waiting or 0) > 0 and server.seconds > _SILENT_S
    return f"{load}, but its scheduler has been silent for {server.seconds:.0f} s" if silent else load
