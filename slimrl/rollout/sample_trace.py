"""What the timeline shows of samples: their requests, what happens between these, and their rewards.

Promises one span on the track "requests" per request that an engine was asked, from the moment in which it was sent,
with how long it had waited before in `waited_ms`; and at most `limit` spans on each track per rollout, the others
being counted. Made by the rollout manager, used by the sample maker.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from slimrl.data.sample import Sample
from slimrl.observability.timeline import REQUESTS, WAITED_MS
from slimrl.observability.timeline_recorder import Timeline
from slimrl.rollout.engine import EngineClient, Generation

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
