"""Which samples somebody works on right now, since when, and where their tasks stand.

Kept by the sample maker, read from another thread when the driver wonders what it is waiting for.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import sysconfig
import time
from collections.abc import Callable, Iterator
from types import FrameType

from slimrl.data.sample import Sample

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


@dataclasses.dataclass(frozen=True)
class SampleWhere:
    """One unfinished sample: its stage ("generation", "the reward", ...), how long in it, and the line it waits in."""

    index: int
    group_index: int
    stage: str
    seconds: float
    line: str


@dataclasses.dataclass(frozen=True)
class _Work:
    sample: Sample
    stage: str
    since: float
    task: asyncio.Task[object] | None


class UnderWay:
    """`with under_way.at(sample, "generation"): await ...`; `where` may be called from any thread."""

    def __init__(self, on_end: Callable[[Sample, str, float], None] = lambda sample, stage, since: None) -> None:
        """`on_end` hears of each piece of work that is over: its sample, its stage, and since when (time.monotonic)."""
        self._work: dict[int, _Work] = {}
        self._on_end = on_end

    @contextlib.contextmanager
    def at(self, sample: Sample, stage: str) -> Iterator[None]:
        """The sample is in `stage` within this block, in the task that runs it."""
        work = _Work(sample, stage, time.monotonic(), asyncio.current_task())
        self._work[id(work)] = work  # not by sample: functions of the user may work on one in several tasks
        try:
            yield
        finally:
            del self._work[id(work)]
            self._on_end(sample, stage, work.since)

    def where(self) -> list[SampleWhere]:
        """All of them, the one that has been in its stage for longest first."""
        work = sorted(self._work.copy().values(), key=lambda entry: entry.since)
        now = time.monotonic()
        return [
            SampleWhere(
                entry.sample.index, entry.sample.group_index, entry.stage, now - entry.since, awaited_line(entry.task)
            )
            for entry in work
        ]


def awaited_line(task: asyncio.Task[object] | None) -> str:
    """ "hooks.py:31 generate": the innermost line of the task's coroutines outside of libraries; "" for none."""
    coroutine = task.get_coro() if task is not None else None
    found = ""
    while inspect.iscoroutine(coroutine):
        if (frame := coroutine.cr_frame) is not None and _is_own(frame):
            found = shown(frame)
        coroutine = coroutine.cr_await
    return found


def running_line(frame: FrameType | None) -> str:
    """The same for a thread that is at `frame`."""
    while frame is not None and not _is_own(frame):
        frame = frame.f_back
    return "" if frame is None else shown(frame)


def shown(frame: FrameType) -> str:
    """ "file:line function"."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"


def _is_own(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith((*_LIBRARIES, "<"))
