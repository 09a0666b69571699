"""Fully asynchronous generation (`--max-weight-staleness N`): groups stay in flight across rollouts and weight updates.

Invariants:
- A rollout has no token sampled by weights more than N rollouts older than the weights that it trains.
- No more groups are started than can be trained in time, and a rollout waits for groups that would expire.
- Every sampled group is returned once, dropped once by the dynamic sampling filter, skipped once because a sample
  failed (`--skip-failed-samples`), or regenerated. The checkpoint state has all other sampled groups.
- No rollout is returned after a failure.

`RolloutGenerator` creates it; the rollout manager notifies it of new weights.

The checkpoint state (`InflightState`) has the groups that were sampled from the data source and are not trained on yet.
A resumed run restores all of them, whether it is fully asynchronous or not. Columns with an entry per token are packed
into text: lists of numbers take many times as long to write, and training waits for it. Custom values become plain data
(numbers, text, lists, tuples, dicts). Subclasses and numpy and torch scalars are converted; anything else is rejected
with its location in the sample.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import time
from array import array
from collections.abc import Callable, Iterable
from typing import Any

from slimrl.arguments.flags.rollout import RolloutArguments
from slimrl.data.sample import Sample
from slimrl.engines.protocol import SamplingConfig, StoppableEngine
from slimrl.rollout.async_utils import cancel_and_wait
from slimrl.rollout.asynchronous.staleness import (
    can_train_without_expiring,
    has_unknown_version,
    oldest_version,
    reset_to_prompt,
)
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.filter_hub.dynamic_sampling_filters import GroupFilter
from slimrl.rollout.generation.inflight_groups import MAX_CONSECUTIVE_DROPS, DynamicSampler, GroupTask, InflightGroups
from slimrl.rollout.generation.sample_generator import SampleConfig, SampleGenerator


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


_KEY = "drawn"  # checkpoint key, next to the data source's keys
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
    """A scored group; `drawn` is the group as sampled from the data source, `oldest` its oldest weight version."""

    group: list[Sample]
    drawn: list[Sample]
    oldest: int


@dataclasses.dataclass(frozen=True)
class InflightState:
    """All groups not trained on yet; `under_way` are the unfinished ones, as sampled from the data source."""

    under_way: list[list[Sample]]
    finished: list[FinishedGroup]

    def added_to(self, state: dict[str, Any]) -> dict[str, Any]:
        """The data source's state plus this one, as plain JSON data. Raises ValueError like `check_serializable`."""
        entry = {
            "under_way": [_group_as_dicts(group) for group in self.under_way],
            "finished": [
                {"group": _group_as_dicts(one.group), "drawn": _group_as_dicts(one.drawn), "oldest": one.oldest}
                for one in self.finished
            ],
        }
        return {**state, _KEY: entry}


def restore(data_source: RolloutDataSource, state: dict[str, Any], *, keeps_finished: bool) -> list[FinishedGroup]:
    """Restores the data source from `state`; unfinished groups are returned to it.

    Returns the finished groups. If `keeps_finished` is False, these go back to the data source too, to be trained on
    next.
    """
    entry = state.get(_KEY, {"under_way": [], "finished": []})
    data_source.load_state_dict({name: value for name, value in state.items() if name != _KEY})
    finished = [
        FinishedGroup(_samples(one["group"]), _samples(one["drawn"]), one["oldest"]) for one in entry["finished"]
    ]
    if not keeps_finished:
        data_source.add_samples([one.group for one in finished])
    data_source.add_samples([_samples(group) for group in entry["under_way"]])
    return finished if keeps_finished else []


def check_serializable(samples: Iterable[Sample]) -> None:
    """Raises ValueError if a sample cannot be saved in a checkpoint: when it finishes, not at the next save."""
    for sample in samples:
        for name in _NAMES:
            _packed(sample, name, _PACKED[name]) if name in _PACKED else _plain_field(sample, name)


def _group_as_dicts(group: list[Sample]) -> list[dict[str, Any]]:
    """The fields of the samples; attributes that custom functions add to a sample are not saved."""
    return [
        {
            name: _packed(sample, name, code) if (code := _PACKED.get(name)) else _plain_field(sample, name)
            for name in _NAMES
        }
        for sample in group
    ]


def _plain_field(sample: Sample, name: str) -> Any:
    try:
        return plain_data(getattr(sample, name))
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
        self._source.add_samples([[reset_to_prompt(sample) for sample in finished.drawn]])
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
