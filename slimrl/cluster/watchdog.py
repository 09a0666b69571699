"""The watchdog of the driver's waits: reports what a long wait is for and where each process is, and may end the run.

Asking never hangs: a process that does not answer within seconds is reported as that. The supervisor uses it in every
wait; whoever waits says what to report. Actors answer with `RankStatus` and `RolloutStatus`, which
`format_rank_status` and `format_rollout_status` turn into the text of the report.
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
from slimrl.engines.sglang.control import ServerLoad
from slimrl.rollout.generation.sample_tracker import ActiveSample

logger = logging.getLogger("slimrl")

ANSWER_TIMEOUT_S = 5.0


class WatchdogTimeoutError(RuntimeError):
    """A wait reached --watchdog-limit-seconds; the message says what was awaited and where everybody stood."""


@dataclasses.dataclass(frozen=True)
class WaitTarget:
    """What a wait is for: "train of rollout 7".

    `describe(places)` says where those stand whose calls, at these places of the list that is waited for, have not
    returned.
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
        self, patience: WatchdogConfig, awaited: WaitTarget, bystanders: Callable[[], str] = lambda: ""
    ) -> None:
        """`bystanders` says what keeps those waiting that are waited for, as far as others know it, or ""."""
        self._bystanders = bystanders
        self._patience = patience
        self._awaited = awaited
        self._started = time.monotonic()
        self._next_report_s = patience.report_after_s

    def remaining(self) -> float | None:
        """Seconds until `look` has something to do; None for ever."""
        times = [time_s for time_s in (self._next_report_s, self._patience.limit_s) if time_s]
        return max(min(times) - self._waited(), 0.0) if times else None

    def look(self, places: Sequence[int]) -> None:
        """Reports where those at `places` stand when it is time, and again after twice as long.

        Raises WatchdogTimeoutError with the report when the limit is reached.
        """
        waited, limit = self._waited(), self._patience.limit_s
        too_long = limit is not None and waited >= limit
        if not too_long and (not self._next_report_s or waited < self._next_report_s):
            return
        others = self._bystanders()
        report = f"waiting {waited:.0f} s for {self._awaited.what}: {self._awaited.describe(places)}"
        report += f"; {others}" if others else ""
        if too_long:
            raise WatchdogTimeoutError(f"{report}; the run ends (--watchdog-limit-seconds {limit:g})")
        logger.warning("%s", report)
        self._next_report_s *= 2

    def _waited(self) -> float:
        return time.monotonic() - self._started


def answers(refs: Sequence[ObjectRef]) -> list[Any | None]:
    """What each call returned; None where it does not return within a few seconds, or the actor is dead."""
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=ANSWER_TIMEOUT_S)
    return [_answer(ref) if ref in ready else None for ref in refs]


def _answer(ref: ObjectRef) -> Any | None:
    try:
        return ray.get(ref)
    except RayActorError:  # the watch over it says so, with the cause
        return None


_SHOWN_STAGES = 5
_SHOWN_IDS = 16
_SILENT_S = 4.0


@dataclasses.dataclass(frozen=True)
class RankStatus:
    """One training rank; `seconds` since it last said something, `frames` innermost first (see `processes.stacks`)."""

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
        """What it is at, without saying who it is."""
        if self.method is None:
            return "done"
        if self.micro_batches and self.micro_batch < self.micro_batches:
            return f"in micro-batch {self.micro_batch} of {self.micro_batches}"
        return f"in its last micro-batch, {self.micro_batch}" if self.micro_batches else f"in {self.method}"


@dataclasses.dataclass(frozen=True)
class RolloutStatus:
    """The rollout manager: what it does, how far it is, and who keeps it; `blocked_line` is a line of code or ""."""

    doing: str
    finished: int
    expected: int
    samples: list[ActiveSample]
    in_flight: int
    blocked_line: str
    servers: list[ServerLoad]
    log: str


def format_rank_status(ranks: Sequence[RankStatus | None], pending: Sequence[int]) -> str:
    """The ranks by where they stand: those that answered last, the furthest behind first."""
    silent = [rank for rank in pending if ranks[rank] is None]
    asked = [where for rank in pending if (where := ranks[rank]) is not None]
    asked.sort(key=lambda where: (where.state != "stopped", where.micro_batch, -where.seconds))
    groups: dict[tuple[str, str], list[RankStatus]] = {}
    for where in asked:
        groups.setdefault((where.place, where.state), []).append(where)
    parts = [f"{_ranks(silent)} cannot be asked: no answer of the actor"] if silent else []
    parts += [_group(place, state, members) for (place, state), members in groups.items()]
    done = [rank for rank in range(len(ranks)) if rank not in pending]
    return "; ".join(parts + ([f"{_ranks(done)} done"] if done else []))


def _group(place: str, state: str, members: Sequence[RankStatus]) -> str:
    first = members[0]
    who = f"rank {first.rank} (pid {first.pid} on {first.node})" if len(members) == 1 else _ranks(_numbers(members))
    stopped = "" if state in ("running", "sleeping") else f", process {state}"
    at = f", at {first.frames[0]}{_own(first.frames)}" if first.frames else ""
    return f"{who} {place} for {first.seconds:.0f} s{stopped}{at} (stacks in {first.log})"


def _own(frames: Sequence[str]) -> str:
    """The innermost frame of slimrl, which says what for."""
    own = next((frame for frame in frames if "/slimrl/" in frame), None)
    return f", called from {own}" if own is not None and own != frames[0] else ""


def _numbers(members: Sequence[RankStatus]) -> list[int]:
    return sorted(where.rank for where in members)


def _ranks(numbers: Sequence[int]) -> str:
    return _counted("rank", numbers)


def _counted(what: str, numbers: Sequence[int]) -> str:
    """ "rank 3", or "ranks 0, 1, 2 and 5 more"."""
    shown = ", ".join(map(str, numbers[:_SHOWN_IDS]))
    more = f" and {len(numbers) - _SHOWN_IDS} more" if len(numbers) > _SHOWN_IDS else ""
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}{more}"


def format_rollout_status(where: RolloutStatus | None) -> str:
    """The rollout manager's report in words."""
    if where is None:
        return "the rollout manager cannot be asked: no answer of the actor"
    parts = [where.doing] if where.doing else []
    if where.blocked_line:
        parts.append(
            f"its event loop is blocked at {where.blocked_line}: a function there must not wait without await"
            f" (stacks in {where.log})"
        )
    if where.expected:
        parts.append(f"{where.expected - where.finished} of {where.expected} samples unfinished")
    parts += _samples(where.samples, where.blocked_line)
    if where.servers:
        parts.append(f"{where.in_flight} requests in flight; " + ", ".join(map(_server, where.servers)))
    return "; ".join(parts)


def _samples(samples: Sequence[ActiveSample], blocked_line: str) -> list[str]:
    """The samples by stage and line, the slowest first; of a blocked loop only the one that blocks it, if any does."""
    chosen = [sample for sample in samples if blocked_line and sample.line == blocked_line] or samples
    groups: dict[tuple[str, str], list[ActiveSample]] = {}
    for sample in chosen:
        groups.setdefault((sample.stage, sample.line), []).append(sample)
    shown, others = list(groups.items())[:_SHOWN_STAGES], list(groups.values())[_SHOWN_STAGES:]
    parts = [_in_stage(stage, line, members) for (stage, line), members in shown]
    return parts + ([f"{sum(map(len, others))} more elsewhere"] if others else [])


def _in_stage(stage: str, line: str, members: Sequence[ActiveSample]) -> str:
    who = _counted("sample", [sample.index for sample in members])
    return f"{who} in {stage} for {members[0].seconds:.0f} s" + (f" at {line}" if line else "")


def _server(server: ServerLoad) -> str:
    if server.running is None or server.seconds is None:
        return f"server {server.url} does not answer"
    load = f"server {server.url} runs {server.running} and queues {server.waiting}"
    silent = server.running + (server.waiting or 0) > 0 and server.seconds > _SILENT_S
    return f"{load}, but its scheduler has said nothing for {server.seconds:.0f} s" if silent else load
