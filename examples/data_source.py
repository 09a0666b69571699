"""A custom data source: generates additions on demand, with longer numbers as training continues.

--data-source-path examples.data_source.Additions --input-key unused --num-rollout 100 --rm-type math

No --prompt-data is read. A resumed run continues with the same additions.
"""

from __future__ import annotations

import random
from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample

_PROMPTS_PER_DIGIT = 1000


class Additions:
    """Endless additions; every 1000 prompts the numbers get one more digit, up to eight."""

    def __init__(self, args: Arguments) -> None:
        self._args = args
        self._made = 0
        self._waiting: list[list[Sample]] = []

    def __len__(self) -> int:
        return _PROMPTS_PER_DIGIT  # one epoch of --num-epoch

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """Returned groups first, then new ones; slimrl numbers and tokenizes the samples."""
        groups, self._waiting = self._waiting[:num_groups], self._waiting[num_groups:]
        return groups + [self._new_group() for _ in range(num_groups - len(groups))]

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Keeps the surplus groups of a full rollout."""
        self._waiting += groups

    def state_dict(self) -> dict[str, Any]:
        """The position in the endless sequence, and the waiting groups."""
        return {"made": self._made, "waiting": [[sample.to_dict() for sample in group] for group in self._waiting]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
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
