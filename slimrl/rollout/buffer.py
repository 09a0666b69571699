"""Groups that wait for a later rollout: unfinished ones, and finished ones for which a full rollout had no place.

Promises that a group comes out exactly once, whatever `--buffer-filter-path` does, and that the state it gives is a
copy. Owned by the data source, which hands these groups out before new prompts and saves them with its position.
"""

from __future__ import annotations

import logging
from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.hooks import BufferFilter, named
from slimrl.rollout.filter_hub.buffer_filters import pop_first

logger = logging.getLogger(__name__)


class GroupBuffer:
    """An ordered list of waiting groups, the longest-waiting first."""

    def __init__(self, args: Arguments) -> None:
        self._args = args
        self._path = args.buffer_filter_path
        self._choose = pop_first if self._path is None else named("--buffer-filter-path", self._path, BufferFilter)
        self._groups: list[list[Sample]] = []

    def __len__(self) -> int:
        """Number of waiting groups."""
        return len(self._groups)

    def put(self, groups: list[list[Sample]]) -> None:
        """Appends groups."""
        self._groups.extend(groups)

    def take(self, num_groups: int, rollout_id: int | None) -> list[list[Sample]]:
        """At most `num_groups` groups, chosen by the buffer filter; they leave the buffer.

        The filter may take groups out for good by removing them without returning them, which is logged. Raises
        ValueError where it returns more than was asked for, or a group that it did not remove or that never waited.
        """
        if not self._groups or num_groups == 0:
            return []
        waiting = list(self._groups)  # held, so that no new list gets an identity of theirs
        before = {id(group) for group in waiting}
        chosen = self._choose(self._args, rollout_id, self._groups, num_groups)
        taken = [id(group) for group in chosen]
        left = {id(group) for group in self._groups}
        if len(taken) > num_groups or len(set(taken)) < len(taken) or not set(taken) <= before - left:
            raise ValueError(
                f"--buffer-filter-path {self._path} returned {len(taken)} groups when asked for {num_groups}: it must"
                " return at most that many, each once, and remove them from the buffer it is given"
            )
        if removed := len(before - left) - len(taken):
            logger.warning("--buffer-filter-path %s took %d groups out for good", self._path, removed)
        return list(chosen)

    def state_dict(self) -> list[list[dict[str, Any]]]:
        """The waiting groups as plain data."""
        return [[sample.to_dict() for sample in group] for group in self._groups]

    def load_state_dict(self, state: list[list[dict[str, Any]]]) -> None:
        """The inverse of `state_dict`; what waited before is replaced."""
        self._groups = [[Sample.from_dict(data) for data in group] for group in state]
