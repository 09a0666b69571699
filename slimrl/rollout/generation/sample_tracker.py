"""Tracks samples in work: stages for the watchdog, timeline spans, a blocked event loop, the current sample.

Stages: which samples are in work, since when, and at which line. The driver's watchdog reads them from another thread.
The blocked-loop check tells a busy event loop from one that a custom function blocks, and names its line.

Timeline: one span per engine request, from when it was sent, with the wait before that in `waited_ms`; at most
`--timeline-requests` spans per track and rollout, the others are counted.

Current sample: helpers such as `slime.utils.http_utils.post` get a URL and a payload only. A context variable, set
around each call of a custom function, gives them engine and sample, also in tasks that the function starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import faulthandler
import inspect
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample, add_span
from slimrl.engines.protocol import EngineClient, Generation
from slimrl.observability.timeline import REQUESTS, WAITED_MS
from slimrl.observability.tracer import Timeline

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


@dataclasses.dataclass(frozen=True)
class ActiveSample:
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


class SampleTracker:
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

    def where(self) -> list[ActiveSample]:
        """All of them, the one that has been in its stage for longest first."""
        work = sorted(self._work.copy().values(), key=lambda entry: entry.since)
        now = time.monotonic()
        return [
            ActiveSample(
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


GENERATION = "generation"
TOOLS = "between requests"
REWARDS = "rewards"


class SampleTrace:
    """One per rollout manager; `begin` is called before each rollout and each evaluation, and after the last."""

    def __init__(self, timeline: Timeline, limit: int) -> None:
        self._timeline = timeline
        self._limit = limit
        self._seen: Counter[str] = Counter()

    @classmethod
    def off(cls) -> SampleTrace:
        """One that shows nothing."""
        return cls(Timeline.off(), 0)

    def begin(self) -> None:
        """Counts from 0 again, and says what the timeline does not show of the time before."""
        for track, seen in self._seen.items():
            if seen > self._limit:
                self._timeline.remark(f"{seen - self._limit:,} of {seen:,} {track} are not shown (--timeline-requests)")
        self._seen.clear()

    def engine_for(self, engine: EngineClient, sample: Sample, rollout_id: int, evaluation: bool) -> EngineClient:
        """`engine`, whose requests are shown as this sample's."""
        if not self._timeline.records:
            return engine
        facts = {"sample": sample.index, "group": sample.group_index, "rollout": rollout_id}
        return _TracedEngine(engine, self, sample.index, facts | ({"evaluation": True} if evaluation else {}))

    def stage(self, sample: Sample, stage: str, since_s: float) -> None:
        """A piece of work on a sample, begun at `since_s` (time.monotonic), is over."""
        if stage != GENERATION:  # which its requests show
            track = REWARDS if stage.startswith("the reward") else stage
            self.show(track, sample.index, int(since_s * 1e9), time.monotonic_ns(), {})

    def show(self, track: str, index: int | None, start_ns: int, end_ns: int, facts: dict[str, Any]) -> None:
        """A span of this sample's, unless the track is full."""
        if not self._timeline.records:
            return
        self._seen[track] += 1
        if self._seen[track] <= self._limit:
            self._timeline.beside(track, f"sample {index}", start_ns, end_ns, **facts)


class _TracedEngine:
    """The engine as one sample sees it."""

    def __init__(self, engine: EngineClient, trace: SampleTrace, index: int | None, facts: dict[str, Any]) -> None:
        self._engine = engine
        self._trace = trace
        self._index = index
        self._facts = facts
        self._answered_ns: int | None = None

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], session_id: str | None = None
    ) -> Generation:
        """As the engine's."""
        asked = self._asked()
        answer: Generation | None = None
        try:
            answer = await self._engine.generate(input_ids, sampling_params, session_id)
            return answer
        finally:
            self._answered_ns = time.monotonic_ns()
            self._show(asked, len(input_ids), answer)

    async def ask(self, path: str, payload: dict[str, Any], session_id: str | None = None) -> Any:
        """As the engine's; shown without what only the answer tells."""
        asked = self._asked()
        try:
            return await self._engine.ask(path, payload, session_id)
        finally:
            self._answered_ns = time.monotonic_ns()
            self._trace.show(REQUESTS, self._index, asked, self._answered_ns, {**self._facts, "path": path})

    async def abort_all(self) -> None:
        """As the engine's."""
        await self._engine.abort_all()

    def _asked(self) -> int:
        asked = time.monotonic_ns()
        if self._answered_ns is not None:
            self._trace.show(TOOLS, self._index, self._answered_ns, asked, {})
        return asked

    def _show(self, asked: int, prompt_tokens: int, answer: Generation | None) -> None:
        facts = {**self._facts, "prompt_tokens": prompt_tokens, "finish": "failed"}
        sent = asked
        if answer is not None:
            if answer.finish_reason == "abort" and not answer.token_ids:
                return  # no engine was asked
            sent = max(asked, answer.sent_ns)
            facts |= {"tokens": len(answer.token_ids), "finish": answer.finish_reason}
            facts |= {"version": answer.weight_version, WAITED_MS: round((sent - asked) / 1e6, 3)}
        self._trace.show(REQUESTS, self._index, sent, self._answered_ns, facts)


_PATIENCE_S = 2.0
_LOOK_INTERVAL_S = 1.0

ENDED = "no line, it was ended"


class LoopMonitor:
    """Made inside the event loop that it watches."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    async def ended(self) -> str:
        """Pending while the loop runs; then what ended it, as far as that can be known."""
        while self._loop.is_running():
            await asyncio.sleep(_LOOK_INTERVAL_S)
        return (
            "the event loop of the rollout manager was ended: a callback in it raised SystemExit or KeyboardInterrupt,"
            " as sys.exit() does; in functions of your own raise an Exception instead"
        )

    async def blocked_line(self) -> str:
        """The line that blocks the loop, "" where it turns. Where it does not, all stacks are written to stderr."""
        if not self._loop.is_running():
            return ENDED
        turn = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        try:
            await asyncio.wait_for(asyncio.wrap_future(turn), _PATIENCE_S)
        except TimeoutError:
            faulthandler.dump_traceback(file=sys.__stderr__)
            return running_line(sys._current_frames().get(self._thread)) or "an unknown line"
        return ""


_headers: contextvars.ContextVar[tuple[str, dict[str, str]]] = contextvars.ContextVar("slimrl_router_headers")
_current: contextvars.ContextVar[CustomGenerateCall] = contextvars.ContextVar("slimrl_making")


def router_url(args: Arguments) -> str:
    """Where functions of the user's find the engines, without a path."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}"


def begin_calls(args: Arguments) -> None:
    """From now on calls of this task to the run's router bring its key along, where there is one."""
    key = args.sglang_options.get("api_key")
    _headers.set((router_url(args), {"Authorization": f"Bearer {key}"} if key else {}))


def own_headers(url: str) -> dict[str, str]:
    """What a call to `url` must bring along: nothing where that is no address of the run's router."""
    own, headers = _headers.get(("", {}))
    return headers if own and url.startswith(f"{own}/") else {}


@dataclasses.dataclass(frozen=True)
class CustomGenerateCall:
    """`router_url` is where the function believes the engines to be; `stopped` says whether the rollout is full.

    `continue_sample(sample, sampling_params)` is the built-in generation. `before` is the sample as the function got
    it, and `versions` are the weights of the answers since then.
    """

    router_url: str
    engine: EngineClient
    stopped: Callable[[], bool]
    continue_sample: Callable[[Sample, dict[str, Any]], Awaitable[None]]
    session_id: str | None
    before: Sample
    versions: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def current(cls) -> CustomGenerateCall | None:
        """Of the sample that this task belongs to; None outside of a function that generates one."""
        return _current.get(None)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Within the block it is the current one of this task, and of those that begin in it."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    async def ask(self, url: str, payload: dict[str, Any]) -> Any:
        """What the engines answer to a POST to `url`, which begins with `router_url`."""
        answer = await self.engine.ask(url.removeprefix(self.router_url), payload, self.session_id)
        meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
        if isinstance(meta, Mapping) and meta.get("weight_version"):
            self.versions.append(str(meta["weight_version"]))
        return answer

    def tell_versions(self, sample: Sample) -> None:
        """Notes on a finished sample which weights answered, where the function noted nothing itself.

        Which of them drew which token is only known where all answers came from the same.
        """
        if not self.versions or len(sample.weight_versions) > len(self.before.weight_versions):
            return
        kept = sample.tokens[: len(self.before.tokens)] == self.before.tokens
        sample.weight_versions = [*(self.before.weight_versions if kept else []), *self.versions]
        sample.version_spans = [list(span) for span in self.before.version_spans] if kept else []
        if len(set(self.versions)) == 1:
            known = sum(count for _, count in sample.version_spans)
            add_span(sample.version_spans, self.versions[0], sample.response_length - known)
