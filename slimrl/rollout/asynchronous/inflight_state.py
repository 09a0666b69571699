"""Checkpoint state of groups that were sampled from the data source and are not trained on yet.

A resumed run restores all of them, whether it is fully asynchronous or not. The rollout loop writes the state, the
rollout manager reads it.

Columns with an entry per token are packed into text: lists of numbers take many times as long to write, and training
waits for it. Custom values become plain data (numbers, text, lists, tuples, dicts). Subclasses and numpy and torch
scalars are converted; anything else is rejected with its location in the sample.
"""

from __future__ import annotations

import base64
import dataclasses
from array import array
from collections.abc import Iterable
from typing import Any

from slimrl.data.sample import Sample
from slimrl.rollout.dataset.data_source import RolloutDataSource


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
