"""The training prompts in the order they are trained on: shuffled epochs without end, resumable exactly.

Each prompt is drawn exactly once per epoch, the order of epoch e depends only on `--rollout-seed` + e, and a
restored state gives the same next prompts. Called by the rollout loop; groups given back are drawn first.
"""

from __future__ import annotations

import random
from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.rollout.buffer import GroupBuffer
from slimrl.rollout.prompts import PromptFormat, PromptSet, load_prompts

_STATE_VERSION = 1


def training_prompt_format(args: Arguments) -> PromptFormat:
    """How the rows of `--prompt-data` are read."""
    return PromptFormat(
        input_key=args.input_key,
        label_key=args.label_key,
        metadata_key=args.metadata_key,
        tool_key=args.tool_key,
        apply_chat_template=args.apply_chat_template,
        chat_template_kwargs=args.apply_chat_template_kwargs,
        max_prompt_len=args.rollout_max_prompt_len,
        keep_messages=args.custom_generate_function_path is not None or args.has_own_rollout_function,
    )


class RolloutDataSource:
    """Endless groups of samples over `--prompt-data`; `group_index` and `index` run over the whole training."""

    def __init__(self, args: Arguments, tokenizer: Any) -> None:
        self._n_samples_per_prompt: int = args.n_samples_per_prompt
        self._shuffle: bool = args.rollout_shuffle
        self._seed: int = args.rollout_seed
        self._prompts: PromptSet = load_prompts(args.prompt_data, training_prompt_format(args), tokenizer)
        self._epoch = 0
        self._position = 0  # of the next prompt in this epoch's order
        self._next_group_index = 0
        self._next_index = 0
        self._rollout_id: int | None = None
        self._buffer = GroupBuffer(args)
        self._order = self._epoch_order()

    def __len__(self) -> int:
        """Number of prompts in one epoch."""
        return len(self._prompts)

    @property
    def epoch(self) -> int:
        """The epoch of the next prompt, from 0."""
        return self._epoch

    @property
    def too_long(self) -> int:
        """Number of prompts left out by `--rollout-max-prompt-len`."""
        return self._prompts.too_long

    def begin_rollout(self, rollout_id: int) -> None:
        """Says for which rollout the next groups are drawn; `--buffer-filter-path` is told."""
        self._rollout_id = rollout_id

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """The next `num_groups` groups of `--n-samples-per-prompt` samples: given-back ones first, oldest first."""
        if num_groups < 0:
            raise ValueError(f"get_samples was asked for {num_groups} groups: ask for zero or more")
        groups = self._buffer.take(num_groups, self._rollout_id)
        while len(groups) < num_groups:
            groups.append(self._next_group())
        return groups

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Gives groups back; they are drawn again before any new prompt."""
        self._buffer.put(groups)

    def state_dict(self) -> dict[str, Any]:
        """The position as plain JSON data; given-back groups included."""
        return {
            "version": _STATE_VERSION,
            "source": self._prompts.source,
            "num_prompts": len(self._prompts),
            "fingerprint": self._prompts.fingerprint,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "next_group_index": self._next_group_index,
            "next_index": self._next_index,
            "returned": self._buffer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken. Raises ValueError where it was taken over other data or another order."""
        self._check_state(state)
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._next_group_index = state["next_group_index"]
        self._next_index = state["next_index"]
        self._buffer.load_state_dict(state["returned"])
        self._order = self._epoch_order()

    def _check_state(self, state: dict[str, Any]) -> None:
        if state.get("version") != _STATE_VERSION:
            raise ValueError(
                f"the saved data position has version {state.get('version')!r}, this slimrl reads {_STATE_VERSION}:"
                " resume with the slimrl that saved it"
            )
        if state["num_prompts"] != len(self._prompts) or state["fingerprint"] != self._prompts.fingerprint:
            raise ValueError(
                f"--prompt-data {self._prompts.source} ({len(self._prompts)} prompts) is not the data set of the"
                f" checkpoint, {state['source']} ({state['num_prompts']} prompts): the rows, the tokenizer, the chat"
                " template or --rollout-max-prompt-len differ; give the same data again"
            )
        for flag, saved, given in (
            ("--rollout-shuffle", state["shuffle"], self._shuffle),
            ("--rollout-seed", state["seed"], self._seed),
        ):
            if saved != given and (flag == "--rollout-shuffle" or self._shuffle):
                raise ValueError(
                    f"{flag} is {given} and the checkpoint's epoch was ordered with {saved}: prompts would be"
                    f" repeated and left out; give {flag} as it was"
                )

    def _next_group(self) -> list[Sample]:
        prompt = self._prompts.prompts[self._order[self._position]]
        group = [
            prompt.sample(group_index=self._next_group_index, index=self._next_index + repeat)
            for repeat in range(self._n_samples_per_prompt)
        ]
        self._next_group_index += 1
        self._next_index += self._n_samples_per_prompt
        self._position += 1
        if self._position == len(self._prompts):
            self._epoch += 1
            self._position = 0
            self._order = self._epoch_order()
        return group

    def _epoch_order(self) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(self._seed + self._epoch).shuffle(order)
        return order
