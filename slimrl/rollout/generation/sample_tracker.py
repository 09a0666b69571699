"""Tracks samples in work: stages for the watchdog, timeline spans, a blocked event loop, the current sample.

Stages: which samples are in work, since when, and at which line. The driver's watchdog reads them from another thread.
The blocked-loop check distinguishes a busy event loop from one that a custom function blocks, and names its line.

Timeline: one span per engine request, from the time it was sent, with the wait before that in `waited_ms`. Each track
shows at most `--timeline-requests` spans per rollout; the others are counted.

Current sample: helpers such as `slime.utils.http_utils.post` receive only a URL and a payload. A context variable, set
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
from typing import Any, cast

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample, add_span
from slimrl.engines.prompt_images import PromptImages, with_images
from slimrl.engines.protocol import EngineClient, Generation
from slimrl.observability.timeline import REQUESTS, WAITED_MS
from slimrl.observability.tracer import Timeline

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


@dataclasses.dataclass(frozen=True)
class ActiveSample:
    """One unfinished sample: its stage ("generation", "the reward", ...), the time in it, and the line it waits at."""

    index: int
    group_index: int
    stage: str
    seconds: float
    line: str


@dataclasses.dataclass(slots=True, eq=False)  # a frozen one costs more to create
class _Work:
    sample: Sample
    stage: str
    since: float
    task: asyncio.Task[object] | None


class _Stage:
    """The context of `SampleTracker.at`; a class costs less than a generator, and every sample has two."""

    __slots__ = ("_on_end", "_work", "_works")

    def __init__(self, work: _Work, works: dict[int, _Work], on_end: Callable[[Sample, str, float], None]) -> None:
        self._work = work
        self._works = works
        self._on_end = on_end

    def __enter__(self) -> None:
        # not by sample: custom functions may work on one sample in several tasks
        self._works[id(self._work)] = self._work

    def __exit__(self, *error: object) -> None:
        del self._works[id(self._work)]
        self._on_end(self._work.sample, self._work.stage, self._work.since)


class SampleTracker:
    """`with tracker.at(sample, "generation"): await ...`; `snapshot` may be called from any thread."""

    def __init__(self, on_end: Callable[[Sample, str, float], None] = lambda sample, stage, since: None) -> None:
        """`on_end` is called at the end of each stage with sample, stage and start time (time.monotonic)."""
        self._work: dict[int, _Work] = {}
        self._on_end = on_end

    def at(self, sample: Sample, stage: str, task: asyncio.Task[Any] | None = None) -> _Stage:
        """Marks the sample as being in `stage` within the `with` block, in `task`, by default the current one."""
        return _Stage(_Work(sample, stage, time.monotonic(), task or asyncio.current_task()), self._work, self._on_end)

    def snapshot(self) -> list[ActiveSample]:
        """All samples in work, the one longest in its stage first."""
        work = sorted(self._work.copy().values(), key=lambda entry: entry.since)
        now = time.monotonic()
        # data sources set both indices of each sample
        return [
            ActiveSample(
                cast("int", entry.sample.index),
                cast("int", entry.sample.group_index),
                entry.stage,
                now - entry.since,
                awaited_line(entry.task),
            )
            for entry in work
        ]


def awaited_line(task: asyncio.Task[object] | None) -> str:
    """ "hooks.py:31 generate": the innermost line of the task's coroutines outside libraries; "" if there is none."""
    coroutine = task.get_coro() if task is not None else None
    found = ""
    while inspect.iscoroutine(coroutine):
        if (frame := coroutine.cr_frame) is not None and _outside_libraries(frame):
            found = shown(frame)
        coroutine = coroutine.cr_await
    return found


def running_line(frame: FrameType | None) -> str:
    """Like `awaited_line`, for a thread whose current frame is `frame`."""
    while frame is not None and not _outside_libraries(frame):
        frame = frame.f_back
    return "" if frame is None else shown(frame)


def shown(frame: FrameType) -> str:
    """ "file:line function"."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"


def _outside_libraries(frame: FrameType) -> bool:
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
        """A trace that records nothing."""
        return cls(Timeline.off(), 0)

    def begin(self) -> None:
        """Resets the counts, and notes in the timeline how many spans were omitted since the last call."""
        for track, seen in self._seen.items():
            if seen > self._limit:
                self._timeline.annotate(
                    f"{seen - self._limit:,} of {seen:,} {track} are not shown (--timeline-requests)"
                )
        self._seen.clear()

    def engine_for(self, engine: EngineClient, sample: Sample, rollout_id: int, evaluation: bool) -> EngineClient:
        """`engine` wrapped so that its requests are recorded for this sample."""
        if not self._timeline.records:
            return engine
        facts = {"sample": sample.index, "group": sample.group_index, "rollout": rollout_id}
        return _TracedEngine(engine, self, sample.index, facts | ({"evaluation": True} if evaluation else {}))

    def stage(self, sample: Sample, stage: str, since_s: float) -> None:
        """Records a stage of a sample that began at `since_s` (time.monotonic) and has just ended."""
        if stage != GENERATION:  # recorded as requests
            track = REWARDS if stage.startswith("the reward") else stage
            self.show(track, sample.index, int(since_s * 1e9), time.monotonic_ns(), {})

    def show(self, track: str, index: int | None, start_ns: int, end_ns: int, facts: dict[str, Any]) -> None:
        """Records a span of sample `index`, unless the track is full."""
        if not self._timeline.records:
            return
        self._seen[track] += 1
        if self._seen[track] <= self._limit:
            self._timeline.add_span(track, f"sample {index}", start_ns, end_ns, **facts)


class _TracedEngine:
    """An engine client that records the requests of one sample."""

    def __init__(self, engine: EngineClient, trace: SampleTrace, index: int | None, facts: dict[str, Any]) -> None:
        self._engine = engine
        self._trace = trace
        self._index = index
        self._facts = facts
        self._answered_ns: int | None = None

    async def generate(
        self,
        input_ids: list[int],
        sampling_params: dict[str, Any],
        session_id: str | None = None,
        images: PromptImages | None = None,
    ) -> Generation:
        """See `EngineClient`."""
        asked = self._start_request()
        answer: Generation | None = None
        try:
            answer = await self._engine.generate(input_ids, sampling_params, session_id, **with_images(images))
            return answer
        finally:
            self._answered_ns = answered = time.monotonic_ns()
            self._show(asked, answered, len(input_ids), answer)

    async def ask(self, path: str, payload: dict[str, Any], session_id: str | None = None) -> Any:
        """See `EngineClient`; recorded without the values of the response."""
        asked = self._start_request()
        try:
            return await self._engine.ask(path, payload, session_id)
        finally:
            self._answered_ns = time.monotonic_ns()
            self._trace.show(REQUESTS, self._index, asked, self._answered_ns, {**self._facts, "path": path})

    async def abort_all(self) -> None:
        """See `EngineClient`."""
        await self._engine.abort_all()

    def _start_request(self) -> int:
        asked = time.monotonic_ns()
        if self._answered_ns is not None:
            self._trace.show(TOOLS, self._index, self._answered_ns, asked, {})
        return asked

    def _show(self, asked: int, answered: int, prompt_tokens: int, answer: Generation | None) -> None:
        facts = {**self._facts, "prompt_tokens": prompt_tokens, "finish": "failed"}
        sent = asked
        if answer is not None:
            if answer.finish_reason == "abort" and not answer.new_tokens:
                return  # no request was sent
            sent = max(asked, answer.sent_ns)
            facts |= {"tokens": answer.new_tokens, "finish": answer.finish_reason}
            facts |= {"version": answer.weight_version, WAITED_MS: round((sent - asked) / 1e6, 3)}
        self._trace.show(REQUESTS, self._index, sent, answered, facts)


_TIMEOUT_S = 2.0
_POLL_INTERVAL_S = 1.0

ENDED = "no line, it was ended"


class LoopMonitor:
    """Monitors the event loop in which it is created."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    async def ended(self) -> str:
        """Waits until the loop has ended, then returns the probable reason."""
        while self._loop.is_running():
            await asyncio.sleep(_POLL_INTERVAL_S)
        return (
            "the event loop of the rollout manager was ended: a callback in it raised SystemExit or KeyboardInterrupt,"
            " as sys.exit() does; raise an Exception in custom functions instead"
        )

    async def blocked_line(self) -> str:
        """The line that blocks the loop, "" if the loop responds. If it is blocked, writes all stacks to stderr."""
        if not self._loop.is_running():
            return ENDED
        probe = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        try:
            await asyncio.wait_for(asyncio.wrap_future(probe), _TIMEOUT_S)
        except TimeoutError:
            faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
            return running_line(sys._current_frames().get(self._thread)) or "an unknown line"
        return ""


REPLACEMENT_LIMIT_S = 1200.0  # for the servers of a model to be replaced, as for the run's own requests

_access: contextvars.ContextVar[RouterAccess] = contextvars.ContextVar("slimrl_router_access")  # of the current task
_current: contextvars.ContextVar[CustomGenerateCall] = contextvars.ContextVar("slimrl_custom_generate_call")


@dataclasses.dataclass(frozen=True)
class RouterAccess:
    """The router's address for custom functions, `url` without a path, and its API key.

    `others` are the addresses of the routers of frozen models, which have the same key. `replaced`: lost servers are,
    so calls may wait for them.
    """

    url: str
    key: str | None = dataclasses.field(default=None, repr=False)
    others: tuple[str, ...] = ()
    replaced: bool = False

    @classmethod
    def from_args(cls, args: Arguments) -> RouterAccess:
        """The routers of the run."""
        others = tuple(f"http://{host}:{port}" for host, port in args.sglang_model_routers.values())
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        return cls(url, args.sglang_options.get("api_key"), others, args.use_fault_tolerance)

    def begin_calls(self) -> None:
        """Makes calls of the current task to the run's routers send their API key, if they have one."""
        _access.set(self)

    def has(self, url: str) -> bool:
        """Whether `url` is on a router of the run."""
        return any(url.startswith(f"{router_url}/") for router_url in (self.url, *self.others))


def own_headers(url: str) -> dict[str, str]:
    """The headers that a call to `url` must send: none unless `url` is on a router of the run."""
    access = _access.get(None)
    key = access.key if access is not None and access.has(url) else None
    return {"Authorization": f"Bearer {key}"} if key else {}


def patience_s(url: str) -> float:
    """How long a call to `url` may wait for lost servers: 0 unless it is on a router whose servers are replaced."""
    access = _access.get(None)
    return REPLACEMENT_LIMIT_S if access is not None and access.replaced and access.has(url) else 0.0


@dataclasses.dataclass(frozen=True)
class CustomGenerateCall:
    """One call of a custom generate function, for helpers that it calls.

    `router_url` is the router address that the function uses; `stopped` returns whether the rollout is full.
    `continue_sample(sample, sampling_params)` is the built-in generation. `before` is the sample as passed to the
    function, `versions` the weight versions of the responses since then.
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
        """The call that this task belongs to; None outside a custom generate function."""
        return _current.get(None)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes this the current call within the block, also in tasks that the block starts."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    async def ask(self, url: str, payload: dict[str, Any]) -> Any:
        """Sends a POST to `url`, which begins with `router_url`, and returns the engine's response."""
        answer = await self.engine.ask(url.removeprefix(self.router_url), payload, self.session_id)
        meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
        if isinstance(meta, Mapping) and meta.get("weight_version"):
            self.versions.append(str(meta["weight_version"]))
        return answer

    def record_versions(self, sample: Sample) -> None:
        """Sets the weight versions of a finished sample if the function did not.

        The version of each token is known only if all responses have the same version.
        """
        if not self.versions or len(sample.weight_versions) > len(self.before.weight_versions):
            return
        kept = sample.tokens[: len(self.before.tokens)] == self.before.tokens
        sample.weight_versions = [*(self.before.weight_versions if kept else []), *self.versions]
        sample.version_spans = [list(span) for span in self.before.version_spans] if kept else []
        if len(set(self.versions)) == 1:
            known = sum(count for _, count in sample.version_spans)
            add_span(sample.version_spans, self.versions[0], sample.response_length - known)
