"""Fully asynchronous generation (`--max-weight-staleness N`): groups stay in flight across rollouts and weight updates.

Invariants:
- A rollout has no token sampled by weights more than N rollouts older than the weights that it trains.
- No more groups are started than can be trained in time, and a rollout waits for groups that would expire.
- Every sampled group is returned once, dropped once by the dynamic sampling filter, skipped once because a sample
  failed (`--skip-failed-samples`), or regenerated. The checkpoint state has all other sampled groups.
- No rollout is returned after a failure.

`RolloutGenerator` creates it; the rollout manager notifies it of new weights.

Staleness is the number of rollouts between the weights that sampled and the weights that are trained. A weight version
is the number of rollouts trained: rollout r trains the weights r. A token sampled by the weights v has staleness r - v,
and a sample has the staleness of its oldest token. Every run reports the metrics of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import overload

from slimrl.arguments.flags.rollout import RolloutArguments
from slimrl.data.sample import NO_VERSION, Sample, SampleStatus, clip_spans
from slimrl.engines.protocol import SamplingConfig, StoppableEngine
from slimrl.rollout.async_utils import cancel_and_wait
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.filter_hub.dynamic_sampling_filters import MAX_CONSECUTIVE_DROPS, DynamicSampler, GroupFilter
from slimrl.rollout.generation.inflight_groups import (
    FinishedGroup,
    GroupTask,
    InflightGroups,
    InflightState,
    check_serializable,
)
from slimrl.rollout.generation.multi_turn import NON_GENERATION_TIME, TURN_STARTS
from slimrl.rollout.generation.sample_generator import SampleConfig, SampleGenerator
from slimrl.rollout.metrics import START_ROLLOUT_ID


@dataclasses.dataclass(frozen=True)
class ReadyRollout:
    """The groups of one rollout, with statistics since the previous rollout.

    `filtered` is the dynamic sampling filter's record, `left` the number of finished groups that remain, `too_old` the
    number of groups to regenerate. `seconds` is the time since the previous rollout, or since generation began.
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
        rollout: RolloutArguments,
        generator: SampleGenerator,
        config: SampleConfig,
        engine: StoppableEngine,
        sampling: SamplingConfig,
        keep: GroupFilter | None,
        data_source: RolloutDataSource,
        requests: Callable[[], int],
        *,
        max_staleness: int,
        saves: bool,
    ) -> None:
        """`engine` and `generator` must be exclusive to it: neither is stopped or reset before `stop`.

        `requests` tells how many concurrent requests the engines take now; `saves` whether the run saves checkpoints.
        """
        self._group_size = rollout.n_samples_per_prompt
        self._bound = max_staleness
        self._batch = rollout.rollout_batch_size
        self._saves = saves
        self._requests = requests
        self._engine = engine
        self._keep = keep
        self._source = data_source
        self._inflight = InflightGroups(
            rollout,
            0,
            generator,
            config,
            engine,
            sampling,
            keep_original=True,
            on_sample_generated=self._submit_groups,
        )
        self._start_versions: dict[GroupTask, int] = {}  # the engines' weights when the group started; oldest first
        self._ready: list[FinishedGroup] = []
        self._sampler = self._new_sampler()
        self._too_old = 0
        self._version: int | None = None
        self._next = self._end = 0  # the next rollout to return, and the end of the run
        self._since = 0.0  # when the previous rollout was returned
        self._paused = False
        self._collect_task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def progress(self) -> tuple[int, int]:
        """Finished samples for the next rollout, and the number it needs."""
        return min(len(self._ready), self._batch) * self._group_size, self._batch * self._group_size

    def restore(self, finished: list[FinishedGroup]) -> None:
        """Restores the finished groups of a checkpoint; call before the first `set_weight_version`."""
        self._ready = list(finished)

    def set_weight_version(self, version: int, end: int) -> None:
        """Starts or resumes generation with the weights `version`; the run ends before rollout `end`."""
        if self._version is None:
            self._next, self._since = version, time.perf_counter()
            self._collect_task = asyncio.create_task(self._collect_loop())
            self._collect_task.add_done_callback(lambda _: self._notify())
            for finished in [finished for finished in self._ready if finished.oldest > version]:
                self._ready.remove(finished)  # its versions are not comparable (`--start-rollout-id`)
                self._requeue(finished)
        self._version, self._end, self._paused = version, end, False
        self._return_too_old()
        self._submit_groups()

    async def drain(self) -> None:
        """Starts no group until the next `set_weight_version`; returns when none is in flight. Raises SampleError."""
        self._paused = True
        while self._start_versions:
            await self._wait_for_change()
            self._paused = True  # a server replacement calls set_weight_version, which resets it
        self._raise_failure()

    async def next_rollout(self, rollout_id: int) -> ReadyRollout:
        """Waits for the groups of the next rollout: the oldest of the finished ones.

        Raises SampleError, HookFailedError, and RuntimeError if the filter drops everything. Raises even if enough
        groups are finished: the failed group is lost, and no checkpoint may be saved without it.
        """
        if rollout_id != self._next or self._version is None:
            raise ValueError(f"rollout {rollout_id} was requested, but {self._next} is next (weights {self._version})")
        self._raise_failure()
        while not (chosen := self._choose(rollout_id)):
            await self._wait_for_change()
        taken = set(map(id, chosen))
        self._ready = [finished for finished in self._ready if id(finished) not in taken]
        self._next += 1
        filtered, self._sampler = self._sampler, self._new_sampler()
        too_old, self._too_old = self._too_old, 0
        self._return_too_old()
        self._submit_groups()
        since, self._since = self._since, time.perf_counter()
        groups = [finished.group for finished in chosen]
        return ReadyRollout(groups, filtered, len(self._ready), too_old, self._since - since)

    def take_failures(self) -> dict[str, float]:
        """Metrics of the samples that failed and were skipped since the last call."""
        return self._inflight.failed.take_metrics()

    def inflight_state(self) -> InflightState:
        """All sampled groups that were neither returned in a rollout nor dropped by the filter."""
        return InflightState([group_task.original for group_task in self._start_versions], list(self._ready))

    async def stop(self) -> None:
        """Cancels all groups in flight, here and in the engines."""
        self._paused = True  # a sample that ends now must not start another group
        if self._collect_task is not None:
            await cancel_and_wait([self._collect_task])
        await self._inflight.cancel()
        self._start_versions.clear()
        await self._engine.stop()

    def _choose(self, rollout_id: int) -> list[FinishedGroup]:
        """A batch of the oldest finished groups; [] if the rollout has to wait."""
        chosen = sorted(self._ready, key=lambda finished: finished.oldest)[: self._batch]  # stable sort
        waiting = [version + self._bound for version in self._start_versions.values()]
        complete = len(chosen) == self._batch
        return (
            chosen
            if complete and can_train_without_expiring(rollout_id, [f.oldest + self._bound for f in chosen], waiting)
            else []
        )

    def _submit_groups(self) -> None:
        """Starts as many groups as can be trained in time and as the engines have free request slots for."""
        if self._paused or self._version is None:
            return
        rollouts = min(self._version + self._bound + 1, self._end) - self._next
        room = rollouts * self._batch - len(self._start_versions) - len(self._ready)
        if room <= 0:
            return
        free = self._requests() - sum(group_task.generating for group_task in self._start_versions)
        count = min(room, -(-free // self._group_size))
        if count <= 0:
            return
        self._source.begin_rollout(self._next)
        self._inflight.rollout_id = self._next
        for group in self._source.get_samples(count):
            known = [
                reset_to_prompt(sample) if has_unknown_version(sample, self._version) else sample for sample in group
            ]
            self._start_versions[self._inflight.submit(known)] = self._version

    async def _collect_loop(self) -> None:
        """Collects finished groups; ends with the first failure."""
        while True:
            group_task = await self._inflight.next_task()
            start_version = self._start_versions.pop(group_task)
            if not group_task.skipped:
                self._collect(group_task, start_version)
            self._submit_groups()
            self._notify()

    def _collect(self, group_task: GroupTask, start_version: int) -> None:
        group = group_task.group()
        if self._saves:
            check_serializable([*group, *group_task.original])
        oldest = min(oldest_version(sample, start_version) for sample in group)
        finished = FinishedGroup(group, group_task.original, oldest)
        if self._is_too_old(finished):
            self._requeue(finished)
        elif self._sampler.add(group):
            self._ready.append(finished)

    def _is_too_old(self, finished: FinishedGroup) -> bool:
        return self._next - finished.oldest > self._bound

    def _return_too_old(self) -> None:
        """Requeues finished groups that have become too old."""
        for finished in [finished for finished in self._ready if self._is_too_old(finished)]:
            self._ready.remove(finished)
            self._requeue(finished)

    def _requeue(self, finished: FinishedGroup) -> None:
        self._source.add_samples([[reset_to_prompt(sample) for sample in finished.prompts]])
        self._too_old += 1

    def _new_sampler(self) -> DynamicSampler:
        return DynamicSampler(self._keep, max(len(self._source), MAX_CONSECUTIVE_DROPS * self._batch))

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _wait_for_change(self) -> None:
        """Returns when a group has finished. Raises the failure that ended `_collect_loop`."""
        self._raise_failure()
        await self._changed.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._collect_task is not None and self._collect_task.done():
            self._collect_task.result()


_RESPONSE_METADATA = (START_ROLLOUT_ID, NON_GENERATION_TIME, TURN_STARTS)


@overload
def oldest_version(sample: Sample, otherwise: int) -> int: ...


@overload
def oldest_version(sample: Sample, otherwise: None = None) -> int | None: ...


def oldest_version(sample: Sample, otherwise: int | None = None) -> int | None:
    """The oldest weight version that sampled a token of the sample; None if no version is known.

    `otherwise` counts as the version of trained tokens whose version is unknown.
    """
    known = []
    start = 0
    for version, count in sample.version_spans:
        if version.isdecimal():
            known.append(int(version))
        elif otherwise is not None and (version != NO_VERSION or _is_trained(sample, start, start + count)):
            known.append(otherwise)
        start += count
    if not known and otherwise is not None:
        return otherwise
    return min(known, default=None)


def has_unknown_version(sample: Sample, version: int) -> bool:
    """Whether an unfinished sample has tokens of unknown staleness; the engines have the weights `version`.

    These are trained tokens of an unknown weight version (from a checkpoint of an older slimrl, say), and tokens of a
    future version (`--start-rollout-id` before the checkpoint's). A response that comes from the data source, not from
    an engine, does not count.
    """
    sampled = sample.version_spans or sample.weight_versions or START_ROLLOUT_ID in sample.metadata
    if not sample.response_length or not (sampled or sample.status is SampleStatus.ABORTED):
        return False
    start = 0
    for span_version, count in clip_spans(sample.version_spans, sample.response_length):
        if int(span_version) > version if span_version.isdecimal() else _is_trained(sample, start, start + count):
            return True
        start += count
    return False


def staleness_metrics(rollout_id: int, samples: Iterable[Sample]) -> dict[str, float]:
    """Mean, maximum and histogram of the staleness of a rollout's samples; {} if no version is known."""
    oldest = [oldest_version(sample) for sample in samples]
    staleness = [rollout_id - version for version in oldest if version is not None]
    if not staleness:
        return {}
    counts = {f"rollout/staleness/count_{value}": float(count) for value, count in sorted(Counter(staleness).items())}
    return {
        "rollout/staleness/mean": sum(staleness) / len(staleness),
        "rollout/staleness/max": float(max(staleness)),
        **counts,
    }


def reset_to_prompt(sample: Sample) -> Sample:
    """The sample as its prompt alone, to be regenerated."""
    if sample.status is SampleStatus.PENDING and sample.response_length == 0:
        return sample
    return dataclasses.replace(
        sample,
        tokens=sample.tokens[: sample.prompt_length],
        response="",
        response_length=0,
        loss_mask=None,
        rollout_log_probs=None,
        teacher_log_probs=None,
        token_rewards=None,
        teacher_top_ids=None,
        teacher_top_log_probs=None,
        rollout_routed_experts=None,
        weight_versions=[],
        version_spans=[],
        reward=None,
        status=SampleStatus.PENDING,
        remove_sample=False,
        metadata={key: value for key, value in sample.metadata.items() if key not in _RESPONSE_METADATA},
    )


def can_train_without_expiring(rollout_id: int, chosen: Sequence[int], waiting: Sequence[int]) -> bool:
    """Whether rollout `rollout_id` can train the groups `chosen` now without letting a group in flight expire.

    Groups are given by their deadline: the last rollout that may train them. `chosen` is a full batch of the finished
    groups with the earliest deadlines, `waiting` the groups in flight. Waiting groups with deadline d or earlier must
    fit into the batches of the rollouts after this one up to d. If they do not, the rollout waits for them, unless all
    chosen groups have deadline d or earlier too: then waiting does not help.
    """
    return not any(
        sum(due <= last for due in chosen) < len(chosen)
        and sum(due <= last for due in waiting) > max(last - rollout_id, 0) * len(chosen)
        for last in set(waiting)
    )


def _is_trained(sample: Sample, begin: int, end: int) -> bool:
    return sample.loss_mask is None or any(sample.loss_mask[begin:end])
