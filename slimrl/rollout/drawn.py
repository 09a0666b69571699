"""Groups that were drawn from the data source and not yet trained on, as part of what a checkpoint knows of the data.

Promises that a run with continuous generation goes on with all of them, and that any other run does so too. Written by
the rollout loop, read by the rollout manager when a run is resumed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slimrl.data.sample import Sample
from slimrl.rollout.data_source import RolloutDataSource

_KEY = "drawn"  # beside the entries of the data source


@dataclasses.dataclass(frozen=True, eq=False)
class Finished:
    """A judged group, the group as it was drawn, and the oldest weights that drew one of its tokens."""

    group: list[Sample]
    drawn: list[Sample]
    oldest: int


@dataclasses.dataclass(frozen=True)
class Drawn:
    """`under_way` are groups as they were drawn."""

    under_way: list[list[Sample]]
    finished: list[Finished]

    def added_to(self, state: dict[str, Any]) -> dict[str, Any]:
        """The data source's state with this beside it; shares its lists with the samples."""
        entry = {
            "under_way": [_plain(group) for group in self.under_way],
            "finished": [
                {"group": _plain(one.group), "drawn": _plain(one.drawn), "oldest": one.oldest} for one in self.finished
            ],
        }
        return {**state, _KEY: entry}


def restore(data_source: RolloutDataSource, state: dict[str, Any], *, keeps_finished: bool) -> list[Finished]:
    """Lets the data source go on at `state`; groups that were under way are drawn again.

    Returns the finished ones, or with `keeps_finished` false gives them to the data source too, to be trained on next.
    """
    entry = state.get(_KEY, {"under_way": [], "finished": []})
    data_source.load_state_dict({name: value for name, value in state.items() if name != _KEY})
    finished = [Finished(_samples(one["group"]), _samples(one["drawn"]), one["oldest"]) for one in entry["finished"]]
    if not keeps_finished:
        data_source.add_samples([one.group for one in finished])
    data_source.add_samples([_samples(group) for group in entry["under_way"]])
    return finished if keeps_finished else []


def _plain(group: list[Sample]) -> list[dict[str, Any]]:
    return [{**vars(sample), "status": sample.status.value} for sample in group]


def _samples(group: list[dict[str, Any]]) -> list[Sample]:
    return [Sample.from_dict(data) for data in group]
