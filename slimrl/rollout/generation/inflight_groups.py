"""Groups in flight, and the dynamic sampling filter on the finished ones.

`InflightGroups` returns groups in the order in which they finish. No task outlives `cancel`. Ending a rollout early
returns every remaining group exactly once. With `--partial-rollout` these groups keep their generated tokens.

A dynamic sampling filter that drops too many groups in a row ends the run with an error. Accepted groups are sorted by
index at the end, so that the batch does not depend on the order in which they finished.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import cast

from slimrl.arguments.flags.rollout import RolloutArguments
from slimrl.data.sample import Sample
from slimrl.engines.protocol import SamplingConfig, StoppableEngine
from slimrl.rollout.async_utils import cancel_and_wait, gather_or_cancel
from slimrl.rollout.filter_hub.dynamic_sampling_filters import DynamicFilterOutput, GroupFilter
from slimrl.rollout.generation.sample_generator import FailedSamples, SampleConfig, SampleError, SampleGenerator
from slimrl.rollout.metrics import START_ROLLOUT_ID


@dataclasses.dataclass(eq=False)
class GroupTask:
    """One group in flight: `original` is the group as the data source returned it, `samples` its results so far.

    `original` is empty if groups are never regenerated. `generated` is set when no sample waits for an engine.
    `skipped` marks a group in which a sample failed (`--skip-failed-samples`).
    """

    original: list[Sample]
    samples: list[list[Sample]]
    generating: int
    generated: asyncio.Event
    task: asyncio.Task[None] = dataclasses.field(init=False)  # set by `InflightGroups.submit`
    skipped: bool = False

    def group(self) -> list[Sample]:
        """All samples, unfinished ones with their tokens so far."""
        return [sample for samples in self.samples for sample in samples]


class InflightGroups:
    """Groups in flight. `len()` counts those that were submitted and not returned yet."""

    def __init__(
        self,
        rollout: RolloutArguments,
        rollout_id: int,
        generator: SampleGenerator,
        config: SampleConfig,
        engine: StoppableEngine,
        sampling: SamplingConfig,
        *,
        keep_original: bool = False,
        on_sample_generated: Callable[[], None] = lambda: None,
    ) -> None:
        """`keep_original` keeps a copy of every group as submitted; `on_sample_generated` is called once per sample."""
        self._rollout = rollout
        self._on_sample_generated = on_sample_generated
        self.rollout_id = rollout_id
        self._sample_generator = generator
        self._engine = engine
        self._sampling = sampling
        self._config = config
        self.failed = FailedSamples(rollout)
        has_filter = rollout.dynamic_sampling_filter_path is not None
        self._keep_original = keep_original or has_filter and not rollout.partial_rollout
        self._tasks: set[GroupTask] = set()
        self._finished: asyncio.Queue[GroupTask] = asyncio.Queue()

    def __len__(self) -> int:
        return len(self._tasks)

    def submit(self, group: list[Sample]) -> GroupTask:
        """Starts a group. With `--mask-offpolicy-in-partial-rollout` its existing tokens are masked out of training."""
        original = [_copy_of(sample) for sample in group] if self._keep_original else []
        if self._rollout.mask_offpolicy_in_partial_rollout:
            for sample in group:
                sample.loss_mask = [0] * sample.response_length
        group_task = GroupTask(original, [[sample] for sample in group], len(group), asyncio.Event())
        group_task.task = asyncio.create_task(self._generate_group(group_task))
        group_task.task.add_done_callback(lambda _: self._on_done(group_task))
        self._tasks.add(group_task)
        return group_task

    async def next(self) -> list[Sample] | None:
        """The next group to finish; None if it was skipped. Raises SampleError."""
        group_task = await self.next_task()
        return None if group_task.skipped else group_task.group()

    async def next_task(self) -> GroupTask:
        """Like `next`, but returns the group's task."""
        group_task = await self._finished.get()
        self._tasks.discard(group_task)
        self._check(group_task)
        return group_task

    async def abort_and_collect(self) -> list[list[Sample]]:
        """Aborts everything in flight and returns the groups, to be sampled again.

        With `--partial-rollout`, groups keep the tokens generated so far. Otherwise finished groups are returned
        complete, unless `--discard-surplus-groups` is set, and all others as submitted. Raises SampleError.
        """
        if not self._tasks:
            return []
        partial = self._rollout.partial_rollout
        if partial:
            await self._engine.stop()
            await asyncio.gather(*(group_task.generated.wait() for group_task in self._tasks))
        done = [group_task for group_task in self._tasks if group_task.task.done()]
        running = [group_task for group_task in self._tasks if not group_task.task.done()]
        await cancel_and_wait(group_task.task for group_task in running)
        if not partial:
            await self._engine.stop()
        for group_task in done:
            self._check(group_task)
        done = [group_task for group_task in done if not group_task.skipped]
        self._tasks.clear()
        kept = done + running if partial else [] if self._rollout.discard_surplus_groups else done
        groups = [group_task.group() for group_task in kept]
        for sample in (sample for group in groups for sample in group if sample.response_length):
            sample.metadata.setdefault(START_ROLLOUT_ID, self.rollout_id)
        return groups + [group_task.original for group_task in done + running if group_task not in kept]

    async def cancel(self) -> None:
        """Cancels every task; their samples are lost."""
        await cancel_and_wait(group_task.task for group_task in self._tasks)

    def _check(self, group_task: GroupTask) -> None:
        """Marks a failed group as skipped. Raises SampleError if the failure may not be skipped."""
        try:
            group_task.task.result()
        except SampleError as error:
            self.failed.skip(error)
            group_task.skipped = True

    def _on_done(self, group_task: GroupTask) -> None:
        group_task.generated.set()  # a failed or cancelled task has not set it
        self._finished.put_nowait(group_task)

    async def _generate_group(self, group_task: GroupTask) -> None:
        await gather_or_cancel(self._generate_sample(group_task, index) for index in range(len(group_task.samples)))
        if self._sample_generator.scores_groups and not self._engine.stopped:
            await self._sample_generator.score(group_task.group(), self._config)

    async def _generate_sample(self, group_task: GroupTask, index: int) -> None:
        sample = group_task.samples[index][0]
        params = self._sampling.params(sample, sample.index)
        generated = await self._sample_generator.generate(sample, params, self._config, self.rollout_id)
        group_task.samples[index] = generated
        group_task.generating -= 1
        self._on_sample_generated()
        if group_task.generating == 0:
            group_task.generated.set()
        if not self._sample_generator.scores_groups and not self._engine.stopped:
            await self._sample_generator.score(generated, self._config)


def _copy_of(sample: Sample) -> Sample:
    """An independent copy; several times faster than a deep copy of every field."""
    copied = copy.copy(sample)
    for name in (*Sample.PACKABLE, "weight_versions"):
        column = getattr(sample, name)
        setattr(copied, name, None if column is None else list(column))
    copied.version_spans = [list(span) for span in sample.version_spans]
    for name in ("prompt", "label", "reward", "metadata"):
        value = getattr(sample, name)
        if isinstance(value, list | dict):
            setattr(copied, name, copy.deepcopy(value))
    return copied


MAX_CONSECUTIVE_DROPS = 16  # in rollouts' groups; the limit is at least one epoch


class DynamicSampler:
    """Applies the dynamic sampling filter to groups in the order in which they finish."""

    def __init__(self, keep: GroupFilter | None, max_drops: int) -> None:
        """`keep` None accepts every group; `max_drops` drops in a row end the run."""
        self._keep = keep
        self._max_drops = max_drops
        self._dropped_in_a_row = 0
        self._dropped: list[tuple[str, list[Sample]]] = []
        self._reserve: list[tuple[str, list[Sample]]] = []
        self.accepted: list[list[Sample]] = []

    @property
    def dropped(self) -> list[list[Sample]]:
        """Groups that are not trained on."""
        return [group for _, group in self._dropped + self._reserve]

    @property
    def drops(self) -> dict[str, int]:
        """Number of groups that are not trained on, by reason."""
        return dict(Counter(reason for reason, _ in self._dropped + self._reserve))

    def add(self, group: list[Sample]) -> bool:
        """Accepts (True) or drops a finished group. Raises RuntimeError after `max_drops` drops in a row."""
        output = DynamicFilterOutput(True) if self._keep is None else self._keep(group)
        if output.keep:
            self._dropped_in_a_row = 0
            self.accepted.append(group)
            return True
        dropped = self._reserve if output.keep_when_insufficient else self._dropped
        dropped.append((output.reason or "unnamed", group))
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row >= self._max_drops:
            raise RuntimeError(
                f"{self._keep} dropped"
                f" {self._dropped_in_a_row} groups in a row ({self.drops}): the data is too easy, too hard or wrongly"
                " scored for this model; change the data, the reward or the filter"
            )
        return False

    def fill_from_reserve(self, missing: int) -> bool:
        """Accepts up to `missing` groups that were dropped with `keep_when_insufficient`; False if there are none.

        Groups that finished earlier are accepted first.
        """
        chosen, self._reserve = self._reserve[:missing], self._reserve[missing:]
        self.accepted += [group for _, group in chosen]
        return bool(chosen)


def sort_by_index(groups: list[list[Sample]]) -> list[list[Sample]]:
    """The groups, and the samples within them, sorted by index."""
    ordered = [sorted(group, key=_index) for group in groups]
    return sorted(ordered, key=lambda group: _index(group[0]))


def _index(sample: Sample) -> int:
    return cast("int", sample.index)  # every data source sets it
