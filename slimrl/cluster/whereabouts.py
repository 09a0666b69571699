"""Where everybody stands, as data that actors answer with, and as the words of the watchdog's report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from slimrl.rollout.under_way import SampleWhere
from slimrl.sglang.loads import ServerLoad

_SHOWN_STAGES = 5
_SHOWN_IDS = 16
_SILENT_S = 4.0


@dataclasses.dataclass(frozen=True)
class RankWhere:
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
class GenerationWhere:
    """The rollout manager: what it does, how far it is, and who keeps it; `blocked_at` is a line of code or ""."""

    doing: str
    finished: int
    expected: int
    samples: list[SampleWhere]
    in_flight: int
    blocked_at: str
    servers: list[ServerLoad]
    log: str


def of_ranks(ranks: Sequence[RankWhere | None], pending: Sequence[int]) -> str:
    """The ranks by where they stand: those that answered last, the furthest behind first."""
    silent = [rank for rank in pending if ranks[rank] is None]
    asked = [where for rank in pending if (where := ranks[rank]) is not None]
    asked.sort(key=lambda where: (where.state != "stopped", where.micro_batch, -where.seconds))
    groups: dict[tuple[str, str], list[RankWhere]] = {}
    for where in asked:
        groups.setdefault((where.place, where.state), []).append(where)
    parts = [f"{_ranks(silent)} cannot be asked: no answer of the actor"] if silent else []
    parts += [_group(place, state, members) for (place, state), members in groups.items()]
    done = [rank for rank in range(len(ranks)) if rank not in pending]
    return "; ".join(parts + ([f"{_ranks(done)} done"] if done else []))


def _group(place: str, state: str, members: Sequence[RankWhere]) -> str:
    first = members[0]
    who = f"rank {first.rank} (pid {first.pid} on {first.node})" if len(members) == 1 else _ranks(_numbers(members))
    stopped = "" if state in ("running", "sleeping") else f", process {state}"
    at = f", at {first.frames[0]}{_own(first.frames)}" if first.frames else ""
    return f"{who} {place} for {first.seconds:.0f} s{stopped}{at} (stacks in {first.log})"


def _own(frames: Sequence[str]) -> str:
    """The innermost frame of slimrl, which says what for."""
    own = next((frame for frame in frames if "/slimrl/" in frame), None)
    return f", called from {own}" if own is not None and own != frames[0] else ""


def _numbers(members: Sequence[RankWhere]) -> list[int]:
    return sorted(where.rank for where in members)


def _ranks(numbers: Sequence[int]) -> str:
    return _counted("rank", numbers)


def _counted(what: str, numbers: Sequence[int]) -> str:
    """ "rank 3", or "ranks 0, 1, 2 and 5 more"."""
    shown = ", ".join(map(str, numbers[:_SHOWN_IDS]))
    more = f" and {len(numbers) - _SHOWN_IDS} more" if len(numbers) > _SHOWN_IDS else ""
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}{more}"


def of_generation(where: GenerationWhere | None) -> str:
    """The rollout manager's report in words."""
    if where is None:
        return "the rollout manager cannot be asked: no answer of the actor"
    parts = [where.doing] if where.doing else []
    if where.blocked_at:
        parts.append(
            f"its event loop is blocked at {where.blocked_at}: a function there must not wait without await"
            f" (stacks in {where.log})"
        )
    if where.expected:
        parts.append(f"{where.expected - where.finished} of {where.expected} samples unfinished")
    parts += _samples(where.samples, where.blocked_at)
    if where.servers:
        parts.append(f"{where.in_flight} requests in flight; " + ", ".join(map(_server, where.servers)))
    return "; ".join(parts)


def _samples(samples: Sequence[SampleWhere], blocked_at: str) -> list[str]:
    """The samples by stage and line, the slowest first; of a blocked loop only the one that blocks it, if any does."""
    chosen = [sample for sample in samples if blocked_at and sample.line == blocked_at] or samples
    groups: dict[tuple[str, str], list[SampleWhere]] = {}
    for sample in chosen:
        groups.setdefault((sample.stage, sample.line), []).append(sample)
    shown, others = list(groups.items())[:_SHOWN_STAGES], list(groups.values())[_SHOWN_STAGES:]
    parts = [_in_stage(stage, line, members) for (stage, line), members in shown]
    return parts + ([f"{sum(map(len, others))} more elsewhere"] if others else [])


def _in_stage(stage: str, line: str, members: Sequence[SampleWhere]) -> str:
    who = _counted("sample", [sample.index for sample in members])
    return f"{who} in {stage} for {members[0].seconds:.0f} s" + (f" at {line}" if line else "")


def _server(server: ServerLoad) -> str:
    if server.running is None or server.seconds is None:
        return f"server {server.url} does not answer"
    load = f"server {server.url} runs {server.running} and queues {server.waiting}"
    silent = server.running + server.waiting > 0 and server.seconds > _SILENT_S
    return f"{load}, but its scheduler has said nothing for {server.seconds:.0f} s" if silent else load
