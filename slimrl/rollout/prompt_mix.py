"""The prompts of `--prompt-data`: one set, or several from which each prompt is drawn with the set's probability.

Promises that which set the n-th prompt comes from depends only on `--rollout-seed` and n, and that each set keeps its
own epochs. Called by the data source.
"""

from __future__ import annotations

import random
from typing import Any

from slimrl.arguments import Arguments
from slimrl.arguments.prompt_formats import training_prompt_format
from slimrl.data.data_path import DataMix
from slimrl.rollout.prompt_order import PromptOrder
from slimrl.rollout.prompt_rows import PromptRows
from slimrl.rollout.prompts import Prompt


class PromptMix:
    """An endless sequence of prompts."""

    def __init__(self, args: Arguments, tokenizer: Any) -> None:
        mix = DataMix.parse(args.prompt_data)
        # without probabilities several paths make one set
        groups = [mix.paths] if mix.probabilities is None else [(path,) for path in mix.paths]
        self._probabilities = mix.probabilities or (1.0,)
        self._shuffle: bool = args.rollout_shuffle
        self._seed: int = args.rollout_seed
        form = training_prompt_format(args)
        rows = [PromptRows(paths, form, tokenizer, args.max_bad_rows) for paths in groups]
        self._sets = [
            PromptOrder(part, shuffle=self._shuffle, seed=self._seed, number=number) for number, part in enumerate(rows)
        ]
        for part in rows:
            part.check()  # after the orders are made, so that the two do not take turns
        self._drawn = 0
        # --num-epoch alone gives the run its length, which must not change while prompts are found too long
        may_lose_rows = args.rollout_max_prompt_len is not None or args.max_bad_rows > 0
        exact = args.num_rollout is None and may_lose_rows
        self._length = sum(part.count_usable() if exact else len(part) for part in rows)

    def __len__(self) -> int:
        """Number of prompts in one epoch, those included that are not yet known to be bad or too long.

        Where the run's length is given by `--num-epoch` alone, exactly the usable ones.
        """
        return self._length

    @property
    def epoch(self) -> int:
        """The epoch of the next prompt, from 0; of several sets, of the one that is least far."""
        return min(order.epoch for order in self._sets)

    @property
    def too_long(self) -> int:
        """Number of prompts left out by `--rollout-max-prompt-len` so far in this epoch."""
        return sum(order.too_long for order in self._sets)

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts. Raises BadRowsError, and ValueError where a set has no usable prompt."""
        choices = [self._choice(self._drawn + offset) for offset in range(count)]
        drawn = {number: iter(order.draw(choices.count(number))) for number, order in enumerate(self._sets)}
        self._drawn += count
        return [next(drawn[number]) for number in choices]

    def state_dict(self) -> dict[str, Any]:
        """The position as plain JSON data."""
        return {
            "shuffle": self._shuffle,
            "seed": self._seed,
            "drawn": self._drawn,
            "probabilities": list(self._probabilities),
            "sets": [order.state_dict() for order in self._sets],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken. Raises ValueError where it was taken over other data or another order."""
        probabilities = list(self._probabilities)
        if state["probabilities"] != probabilities:
            sources = " ".join(saved["source"] for saved in state["sets"])
            raise ValueError(
                f"--prompt-data has the probabilities {probabilities} and the checkpoint's, {sources}, had"
                f" {state['probabilities']}: prompts would be repeated and left out; give it as it was"
            )
        ordered_by_seed = self._shuffle or len(self._sets) > 1
        for flag, saved, given, matters in (
            ("--rollout-shuffle", state["shuffle"], self._shuffle, True),
            ("--rollout-seed", state["seed"], self._seed, ordered_by_seed),
        ):
            if saved != given and matters:
                raise ValueError(
                    f"{flag} is {given} and the checkpoint's epoch was ordered with {saved}: prompts would be"
                    f" repeated and left out; give {flag} as it was"
                )
        for order, saved in zip(self._sets, state["sets"], strict=True):
            order.load_state_dict(saved)
        self._drawn = state["drawn"]

    def _choice(self, draw: int) -> int:
        """The set of the draw with this number."""
        if len(self._sets) == 1:
            return 0
        number = random.Random(f"{self._seed}/{draw}").random()
        for choice, probability in enumerate(self._probabilities):
            number -= probability
            if number < 0:
                return choice
        return len(self._probabilities) - 1  # the probabilities may sum to a little less than 1
