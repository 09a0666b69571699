"""Groups in flight, and their state in a checkpoint.

`InflightGroups` returns groups in the order in which they finish. No task outlives `cancel`. Ending a rollout early
returns every remaining group exactly once. With `--partial-rollout` these groups keep their generated tokens. Accepted
groups are sorted by index at the end, so that the batch does not depend on the order in which they finished.

The checkpoint state (`InflightState`) has the groups that were sampled from the data source and are not trained on yet.
A resumed run restores all of them, whether it is fully asynchronous or not. Columns with an entry per token are packed
into text: lists of numbers take many times as long to write, and training waits for it. Custom values become plain data
(numbers, text, lists, tuples, dicts). Subclasses and numpy and torch scalars are converted; anything else is rejected
with its location in the sample.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import dataclasses
from array import array
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np

from slimrl.arguments.flags.rollout import RolloutArguments
from slimrl.data.routed_experts import as_plain
from slimrl.data.sample import Sample
from slimrl.engines.protocol import SamplingConfig, StoppableEngine
from slimrl.rollout.async_utils import cancel_and_wait, gather_or_cancel
from slimrl.rollout.dataset.data_source import RolloutDataSource
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


def sort_by_index(groups: list[list[Sample]]) -> list[list[Sample]]:
    """The groups, and the samples within them, sorted by index."""
    ordered = [sorted(group, key=_index) for group in groups]
    return sorted(ordered, key=lambda group: _index(group[0]))


def _index(sample: Sample) -> int:
    return cast("int", sample.index)  # every data source sets it


def plain_data(value: Any) -> Any:
    """An independent copy of `value` as plain data. Raises TypeError with the location of a value that is not."""
    return _plain(value, "")


def _plain(value: Any, location: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, dict):
        return {_key(key, location): _plain(item, f"{location}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{location}[{number}]") for number, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return _plain(value.item(), location)
    kind = type(value)
    raise TypeError(f"{location or 'it'} is of type {kind.__module__}.{kind.__qualname__}")


def _key(key: Any, location: str) -> Any:
    return _plain(key, f"{location}, whose key {key!r}")


_KEY = "inflight_groups"  # in a checkpoint, next to the keys of the data source
_FORMER = {_KEY: "drawn", "unfinished": "under_way", "prompts": "drawn"}  # keys of checkpoints until 2026-11-28
_PACKED = {  # type codes of `array`
    "tokens": "q",
    "loss_mask": "b",
    "rollout_log_probs": "d",
    "teacher_log_probs": "d",
    "token_rewards": "d",
    "teacher_top_ids": "q",
    "teacher_top_log_probs": "d",
}
_NAMES = tuple(field.name for field in dataclasses.fields(Sample))


@dataclasses.dataclass(frozen=True, eq=False)
class FinishedGroup:
    """A scored group; `prompts` is the group as the data source gave it, `oldest` its oldest weight version."""

    group: list[Sample]
    prompts: list[Sample]
    oldest: int


@dataclasses.dataclass(frozen=True)
class InflightState:
    """All groups not trained on yet; `unfinished` are those in generation, as the data source gave them."""

    unfinished: list[list[Sample]]
    finished: list[FinishedGroup]

    def added_to(self, state: dict[str, Any]) -> dict[str, Any]:
        """The data source's state plus this one, as plain JSON data. Raises ValueError like `check_serializable`."""
        entry = {
            "unfinished": [_group_as_dicts(group) for group in self.unfinished],
            "finished": [
                {"group": _group_as_dicts(one.group), "prompts": _group_as_dicts(one.prompts), "oldest": one.oldest}
                for one in self.finished
            ],
        }
        return {**state, _KEY: entry}


def restore(data_source: RolloutDataSource, state: dict[str, Any], *, keeps_finished: bool) -> list[FinishedGroup]:
    """Restores the data source from `state`; unfinished groups are returned to it.

    Returns the finished groups. If `keeps_finished` is False, these go back to the data source too, to be trained on
    next.
    """
    entry = _entry(state, _KEY, {"unfinished": [], "finished": []})
    data_source.load_state_dict({name: value for name, value in state.items() if name not in (_KEY, _FORMER[_KEY])})
    finished = [
        FinishedGroup(_samples(one["group"]), _samples(_entry(one, "prompts")), one["oldest"])
        for one in entry["finished"]
    ]
    if not keeps_finished:
        data_source.add_samples([one.group for one in finished])
    data_source.add_samples([_samples(group) for group in _entry(entry, "unfinished")])
    return finished if keeps_finished else []


def _entry(state: dict[str, Any], key: str, default: Any = None) -> Any:
    return state.get(key, state.get(_FORMER[key], default))


def check_serializable(samples: Iterable[Sample]) -> None:
    """Raises ValueError if a sample cannot be saved in a checkpoint: when it finishes, not at the next save."""
    for sample in samples:
        for name in _NAMES:
            _packed(sample, name, _PACKED[name]) if name in _PACKED else _plain_field(sample, name)


def _group_as_dicts(group: list[Sample]) -> list[dict[str, Any]]:
    """The fields of the samples; attributes that custom functions add to a sample are not saved."""
    return [
        as_plain(
            {
                name: _packed(sample, name, code) if (code := _PACKED.get(name)) else _plain_field(sample, name)
                for name in _NAMES
            }
        )
        for sample in group
    ]


def _plain_field(sample: Sample, name: str) -> Any:
    value = getattr(sample, name)
    if isinstance(value, np.ndarray) and name == "rollout_routed_experts":
        return value  # `as_plain` packs it
    try:
        return plain_data(value)
    except TypeError as error:
        raise ValueError(
            f"sample {sample.index}: its {name} cannot be saved in a checkpoint: {error}; your function or data"
            " source may put only numbers, text, lists and dicts there"
        ) from error


def _packed(sample: Sample, name: str, code: str) -> Any:
    try:
        return base64.b64encode(array(code, getattr(sample, name)).tobytes()).decode()
    except (TypeError, OverflowError):  # None, or a custom function's 1.0 for 1
        return _plain_field(sample, name)


def _samples(group: list[dict[str, Any]]) -> list[Sample]:
    return [
        Sample.from_dict(data | {name: _unpacked(data[name], code) for name, code in _PACKED.items() if name in data})
        for data in group
    ]


def _unpacked(column: str | list[Any] | None, code: str) -> list[Any] | None:
    """A list could not be packed, or comes from a checkpoint of an older slimrl."""
    return array(code, base64.b64decode(column)).tolist() if isinstance(column, str) else column
