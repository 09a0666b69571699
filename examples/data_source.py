"""A data source of one's own: additions made as they are drawn, with longer numbers as training continues.

--data-source-path examples.data_source.Additions --input-key unused --num-rollout 100 --rm-type math

No --prompt-data is read. A run that is resumed draws the additions it would have drawn.
"""

from __future__ import annotations

import random
from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample

_PROMPTS_PER_DIGIT = 1000


class Additions:
    """Endless additions; each 1000 prompts the numbers get a digit more, up to eight."""

    def __init__(self, args: Arguments) -> None:
        self._args = args
        self._made = 0
        self._waiting: list[list[Sample]] = []

    def __len__(self) -> int:
        return _PROMPTS_PER_DIGIT  # what --num-epoch calls one pass

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """Groups that were given back first, then new ones; slimrl numbers and tokenises the samples."""
        groups, self._waiting = self._waiting[:num_groups], self._waiting[num_groups:]
        return groups + [self._new_group() for _ in range(num_groups - len(groups))]

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Keeps groups that a full rollout had no place for."""
        self._waiting += groups

    def state_dict(self) -> dict[str, Any]:
        """The place in the endless sequence, and what waits."""
        return {"made": self._made, "waiting": [[sample.to_dict() for sample in group] for group in self._waiting]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self._made = state["made"]
        self._waiting = [[Sample.from_dict(sample) for sample in group] for group in state["waiting"]]

    def _new_group(self) -> list[Sample]:
        numbers = random.Random(f"{self._args.rollout_seed}/{self._made}")
        digits = min(1 + self._made // _PROMPTS_PER_DIGIT, 8)
        left, right = (numbers.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        self._made += 1
        return [
            Sample(prompt=f"{left}+{right}=", label=str(left + right)) for _ in range(self._args.n_samples_per_prompt)
        ]
