"""The built-in data source: an endless, exactly resumable sequence of sample groups, and a buffer of waiting groups.

Each prompt comes once per epoch of its set. A restored state gives the same next groups. `--data-source-path` puts a
custom class in its place (`slimrl.rollout.dataset.custom_data_source`).

The buffer holds groups for a later rollout: unfinished ones, and finished ones that a full rollout had no room for.
They come before new prompts and are saved with the position. A group leaves the buffer exactly once, whatever
`--buffer-filter-path` does.
"""

from __future__ import annotations

import logging
from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.hooks import BufferFilter, named
from slimrl.rollout.dataset.dataset_mixture import DatasetMixture
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


_STATE_VERSION = 2


class RolloutDataSource:
    """Endless groups of samples; `group_index` and `index` run over the whole training.

    With `--disable-rollout-global-dataset` there are no prompts: samples are blank, for the user's functions to fill.
    """

    def __init__(self, args: Arguments, tokenizer: Any) -> None:
        self._n_samples_per_prompt: int = args.n_samples_per_prompt
        # nothing is drawn where nothing is trained
        self._prompts = (
            DatasetMixture(args, tokenizer) if args.rollout_global_dataset and not args.only_evaluates else None
        )
        self._next_group_index = 0
        self._next_index = 0
        self._rollout_id: int | None = None
        self._buffer = GroupBuffer(args)

    def __len__(self) -> int:
        """Number of prompts in one epoch (see `DatasetMixture`); 0 without prompts."""
        return 0 if self._prompts is None else len(self._prompts)

    @property
    def epoch(self) -> int:
        """The epoch of the next prompt, from 0; of several sets, of the one that is least far."""
        return 0 if self._prompts is None else self._prompts.epoch

    @property
    def too_long(self) -> int:
        """Number of prompts left out by `--rollout-max-prompt-len` so far in this epoch."""
        return 0 if self._prompts is None else self._prompts.too_long

    def begin_rollout(self, rollout_id: int) -> None:
        """Says for which rollout the next groups are sampled; `--buffer-filter-path` is told."""
        self._rollout_id = rollout_id

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """The next `num_groups` groups of `--n-samples-per-prompt` samples: given-back ones first, oldest first.

        Raises InvalidRowsError where more rows than `--max-bad-rows` turned out bad.
        """
        if num_groups < 0:
            raise ValueError(f"get_samples was asked for {num_groups} groups: ask for zero or more")
        groups = self._buffer.take(num_groups, self._rollout_id)
        return groups + self._new_groups(num_groups - len(groups))

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Gives groups back; they are drawn again before any new prompt."""
        self._buffer.put(groups)

    def state_dict(self) -> dict[str, Any]:
        """The position as plain JSON data; given-back groups included. Waits until every row has been checked."""
        return {
            "version": _STATE_VERSION,
            "prompts": None if self._prompts is None else self._prompts.state_dict(),
            "next_group_index": self._next_group_index,
            "next_index": self._next_index,
            "returned": self._buffer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken. Raises ValueError where it was taken over other data or another order."""
        if state.get("version") != _STATE_VERSION:
            raise ValueError(
                f"the saved data position has version {state.get('version')!r}, this slimrl reads {_STATE_VERSION}:"
                " resume with the slimrl that saved it"
            )
        if (state["prompts"] is None) != (self._prompts is None):
            raise ValueError(
                "the checkpoint was made with --prompt-data and this run has --disable-rollout-global-dataset, or the"
                " other way round: give it as it was"
            )
        if self._prompts is not None:
            self._prompts.load_state_dict(state["prompts"])
        self._next_group_index = state["next_group_index"]
        self._next_index = state["next_index"]
        self._buffer.load_state_dict(state["returned"])

    def _new_groups(self, count: int) -> list[list[Sample]]:
        prompts = [None] * count if self._prompts is None else self._prompts.draw(count)
        groups = []
        for prompt in prompts:
            indices = range(self._next_index, self._next_index + self._n_samples_per_prompt)
            if prompt is None:
                group = [Sample(prompt="", group_index=self._next_group_index, index=index) for index in indices]
            else:
                group = [prompt.sample(group_index=self._next_group_index, index=index) for index in indices]
            groups.append(group)
            self._next_group_index += 1
            self._next_index += self._n_samples_per_prompt
        return groups


# the name under which slime has it, where another class lacks the buffer
RolloutDataSourceWithBuffer = RolloutDataSource

# slime has `pop_first` in this module
__all__ = ["RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first"]
