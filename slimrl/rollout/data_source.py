"""Groups of samples over the training prompts, without end: each prompt once per epoch of its set, resumable exactly.

Groups that wait in the buffer go before new prompts. A restored state gives the same next groups. Called by the
rollout loop; `--data-source-path` puts a class of the user's in its place (`slimrl.rollout.own_data_source`).
"""

from __future__ import annotations

from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.rollout.buffer import GroupBuffer
from slimrl.rollout.filter_hub.buffer_filters import pop_first
from slimrl.rollout.prompt_mix import PromptMix

_STATE_VERSION = 2


class RolloutDataSource:
    """Endless groups of samples; `group_index` and `index` run over the whole training.

    With `--disable-rollout-global-dataset` there are no prompts: samples are blank, for the user's functions to fill.
    """

    def __init__(self, args: Arguments, tokenizer: Any) -> None:
        self._n_samples_per_prompt: int = args.n_samples_per_prompt
        # nothing is drawn where nothing is trained
        self._prompts = PromptMix(args, tokenizer) if args.rollout_global_dataset and not args.only_evaluates else None
        self._next_group_index = 0
        self._next_index = 0
        self._rollout_id: int | None = None
        self._buffer = GroupBuffer(args)

    def __len__(self) -> int:
        """Number of prompts in one epoch (see `PromptMix`); 0 without prompts."""
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
        """Says for which rollout the next groups are drawn; `--buffer-filter-path` is told."""
        self._rollout_id = rollout_id

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """The next `num_groups` groups of `--n-samples-per-prompt` samples: given-back ones first, oldest first.

        Raises BadRowsError where more rows than `--max-bad-rows` turned out bad.
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
