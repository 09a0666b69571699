"""Fully asynchronous generation (`--max-weight-staleness N`): groups stay in flight across rollouts and weight updates.

Promises that a rollout holds no token sampled by weights that are more than N rollouts older than those it trains; that
no more groups are begun than can be trained in time, and a rollout waits for those that would become too old; that
every group drawn is handed out once, dropped by the dynamic sampling filter once, left out once because a sample of it
failed (`--skip-failed-samples`), or regenerated; that the state which it gives holds all that is drawn and none of
these; and that nothing is handed out after a failure. Made by `RolloutGenerator`; the rollout manager tells it of new
weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.engines.protocol import StoppableEngine
from slimrl.hooks import DynamicSamplingFilter
from slimrl.rollout.async_utils import cancel_and_wait
from slimrl.rollout.asynchronous.inflight_state import FinishedGroup, InflightState, check_serializable
from slimrl.rollout.asynchronous.staleness import anew, can_train_without_expiring, has_unknown_version, oldest_version
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.generation.inflight_groups import MAX_CONSECUTIVE_DROPS, DynamicSampler, GroupTask, InflightGroups
from slimrl.rollout.generation.sample_generator import SampleGenerator
from slimrl.rollout.sampling import SamplingConfig


@dataclasses.dataclass(frozen=True)
class ReadyRollout:
    """One rollout's groups; the filter's scores since the rollout before; how many were too old and restart.

    `seconds` is the time since the rollout before, or since generation began.
    """

    groups: list[list[Sample]]
    filtered: DynamicSampler
    left: int
    too_old: int
    seconds: float


class AsyncRollout:
    """Works within one event loop, from the first `set_weight_version` to `stop`."""

    def __init__(
        self,
        args: Arguments,
        maker: SampleGenerator,
        engine: StoppableEngine,
        plan: SamplingConfig,
        keep: DynamicSamplingFilter | None,
        data_source: RolloutDataSource,
        requests: int,
    ) -> None:
        """`engine` and `maker` are nobody else's: it is never stopped, nor its samples counted again, before the end.

        `requests` is how many the engines take at once.
        """
        self._args = args
        self._bound: int = args.max_weight_staleness
        self._batch: int = args.rollout_batch_size
        self._requests = requests
        self._engine = engine
        self._keep = keep
        self._source = data_source
        self._flights = InflightGroups(args, 0, maker, engine, plan, keep_drawn=True, sample_ended=self._sample_ended)
        self._under_way: dict[GroupTask, int] = {}  # with the engines' weights when it began; in that order
        self._ready: list[FinishedGroup] = []
        self._collector = self._new_collector()
        self._too_old = 0
        self._version: int | None = None
        self._next = self._end = 0  # the rollout to hand out next, and the end of the run
        self._since = 0.0  # when the rollout before was handed out
        self._held = False
        self._landing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def progress(self) -> tuple[int, int]:
        """Samples that are there for the next rollout, and how many it takes."""
        size = self._args.n_samples_per_prompt
        return min(len(self._ready), self._batch) * size, self._batch * size

    def restore(self, finished: list[FinishedGroup]) -> None:
        """Takes what a checkpoint holds of finished groups; before the first `set_weight_version`."""
        self._ready = list(finished)

    def set_weight_version(self, version: int, end: int) -> None:
        """The engines hold the weights `version` now and continue, or begin; the run ends before rollout `end`."""
        if self._version is None:
            self._next, self._since = version, time.perf_counter()
            self._landing = asyncio.create_task(self._land())
            self._landing.add_done_callback(lambda _: self._tell())
            for finished in [finished for finished in self._ready if finished.oldest > version]:
                self._ready.remove(finished)  # versions were counted otherwise (`--start-rollout-id`)
                self._requeue(finished)
        self._version, self._end, self._held = version, end, False
        self._return_too_old()
        self._admit()

    async def drain(self) -> None:
        """Begins no group until the next `set_weight_version`; returns when none is in flight. Raises SampleError."""
        self._held = True
        while self._under_way:
            await self._change()
            self._held = True  # also where servers were replaced meanwhile
        self._raise_failure()

    async def take(self, rollout_id: int) -> ReadyRollout:
        """The groups of the next rollout, once they are there: of the finished ones those that are oldest.

        Raises SampleError, HookFailedError, and RuntimeError where the filter drops everything: whatever came in
        before, since a group is lost with the failure, which no checkpoint may miss.
        """
        if rollout_id != self._next or self._version is None:
            raise ValueError(f"rollout {rollout_id} was asked for, and {self._next} is next (weights {self._version})")
        self._raise_failure()
        while not (chosen := self._choose(rollout_id)):
            await self._change()
        taken = set(map(id, chosen))
        self._ready = [finished for finished in self._ready if id(finished) not in taken]
        self._next += 1
        filtered, self._collector = self._collector, self._new_collector()
        too_old, self._too_old = self._too_old, 0
        self._return_too_old()
        self._admit()
        since, self._since = self._since, time.perf_counter()
        groups = [finished.group for finished in chosen]
        return ReadyRollout(groups, filtered, len(self._ready), too_old, self._since - since)

    def take_failures(self) -> dict[str, float]:
        """Metrics of the samples that failed and were skipped since this was asked last."""
        return self._flights.failed.take_metrics()

    def drawn(self) -> InflightState:
        """All that the data source gave and that was neither handed out nor dropped by the filter."""
        return InflightState([flight.drawn for flight in self._under_way], list(self._ready))

    async def stop(self) -> None:
        """Ends what is in flight, here and in the engines."""
        self._held = True  # a sample that ends now makes room for no other
        if self._landing is not None:
            await cancel_and_wait([self._landing])
        await self._flights.cancel()
        self._under_way.clear()
        await self._engine.stop()

    def _choose(self, rollout_id: int) -> list[FinishedGroup]:
        """A batch of the oldest finished groups, [] where it must be waited."""
        chosen = sorted(self._ready, key=lambda finished: finished.oldest)[: self._batch]  # stable: as they finished
        waiting = [version + self._bound for version in self._under_way.values()]
        complete = len(chosen) == self._batch
        return (
            chosen
            if complete and can_train_without_expiring(rollout_id, [f.oldest + self._bound for f in chosen], waiting)
            else []
        )

    def _admit(self) -> None:
        """Begins as many groups as can be trained in time, while the engines have room for their requests."""
        if self._held or self._version is None:
            return
        rollouts = min(self._version + self._bound + 1, self._end) - self._next
        room = rollouts * self._batch - len(self._under_way) - len(self._ready)
        if room <= 0:
            return
        free = self._requests - sum(flight.generating for flight in self._under_way)
        count = min(room, -(-free // self._args.n_samples_per_prompt))
        if count <= 0:
            return
        self._source.begin_rollout(self._next)
        self._flights.rollout_id = self._next
        for group in self._source.get_samples(count):
            known = [anew(sample) if has_unknown_version(sample, self._version) else sample for sample in group]
            self._under_way[self._flights.launch(known)] = self._version

    async def _land(self) -> None:
        """Takes in what finishes; ends with the first failure."""
        while True:
            flight = await self._flights.next_flight()
            began = self._under_way.pop(flight)
            if not flight.left_out:
                self._take_in(flight, began)
            self._admit()
            self._tell()

    def _take_in(self, flight: GroupTask, began: int) -> None:
        group = flight.group()
        if self._args.save:
            check_serializable([*group, *flight.drawn])
        oldest = min(oldest_version(sample, began) for sample in group)
        finished = FinishedGroup(group, flight.drawn, oldest)
        if self._is_too_old(finished):
            self._requeue(finished)
        elif self._collector.add(group):
            self._ready.append(finished)

    def _is_too_old(self, finished: FinishedGroup) -> bool:
        return self._next - finished.oldest > self._bound

    def _return_too_old(self) -> None:
        """Whatever lets a finished group become too old, it is not trained on."""
        for finished in [finished for finished in self._ready if self._is_too_old(finished)]:
            self._ready.remove(finished)
            self._requeue(finished)

    def _requeue(self, finished: FinishedGroup) -> None:
        self._source.add_samples([[anew(sample) for sample in finished.drawn]])
        self._too_old += 1

    def _new_collector(self) -> DynamicSampler:
        return DynamicSampler(self._args, self._keep, max(len(self._source), MAX_CONSECUTIVE_DROPS * self._batch))

    def _sample_ended(self) -> None:
        self._admit()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _change(self) -> None:
        """Returns when something has finished. Raises what ended the landing."""
        self._raise_failure()
        await self._changed.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._landing is not None and self._landing.done():
            self._landing.result()
