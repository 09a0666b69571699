"""The task: additions of two-digit numbers, answered in a box, by a pupil who often forgets to carry.

Owns the problems, the right answer, the answer of the forgetful pupil, and the split into train and eval.
Promises: a split depends on its seed only, no eval problem stands in train in either order of its terms, and the
share of problems that need a carry is the same in both, so that whoever always forgets to carry scores exactly
``1 - carry_share``. Called by the warm start and by the tool that writes the jsonl files.
"""

import random
from dataclasses import dataclass

SMALLEST_TERM = 10
LARGEST_SUM = 99


@dataclass(frozen=True)
class Addition:
    """One problem; both terms and their sum have two digits."""

    left: int
    right: int

    @property
    def question(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def needs_carry(self) -> bool:
        return self.left % 10 + self.right % 10 >= 10

    @property
    def answer(self) -> int:
        return self.left + self.right

    @property
    def forgetful_answer(self) -> int:
        """The sum with the carry from the ones to the tens left out (the right sum where there is none)."""
        return self.answer - 10 if self.needs_carry else self.answer

    def row(self) -> dict[str, object]:
        """The line of a jsonl file: OpenAI messages under ``prompt``, the answer under ``label``."""
        return {"prompt": [{"role": "user", "content": self.question}], "label": str(self.answer)}


def boxed(answer: int) -> str:
    """The form in which the pupil answers and which math graders look for."""
    return f"\\boxed{{{answer}}}"


def split_additions(
    *, seed: int, train_size: int, eval_size: int, carry_share: float = 0.6
) -> tuple[list[Addition], list[Addition]]:
    """Draw ``(train, eval)`` problems; raises ValueError where there are not enough different ones."""
    if not 0.0 <= carry_share <= 1.0:
        raise ValueError(f"carry_share is {carry_share}, but a share lies between 0 and 1")
    rng = random.Random(seed)
    train: list[Addition] = []
    held_out: list[Addition] = []
    for with_carry in (True, False):
        share = carry_share if with_carry else 1.0 - carry_share
        pairs = [
            (small, large)
            for small in range(SMALLEST_TERM, LARGEST_SUM + 1)
            for large in range(small, LARGEST_SUM - small + 1)
            if Addition(small, large).needs_carry == with_carry
        ]
        rng.shuffle(pairs)
        eval_count, train_count = round(share * eval_size), round(share * train_size)
        held_out += [Addition(*rng.sample(pair, 2)) for pair in pairs[:eval_count]]
        rest = sorted({order for pair in pairs[eval_count:] for order in (pair, pair[::-1])})
        if len(pairs) < eval_count or len(rest) < train_count:
            raise ValueError(
                f"train_size {train_size} and eval_size {eval_size} ask for {train_count} and {eval_count} problems "
                f"{'with' if with_carry else 'without'} a carry; beside the eval problems only {len(rest)} are left"
            )
        train += [Addition(*pair) for pair in rng.sample(rest, train_count)]
    rng.shuffle(train)
    rng.shuffle(held_out)
    return train, held_out
