"""What a rule is given besides the arguments, and what a rule is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from slimrl.arguments.flag import Problem
from slimrl.arguments.namespace import Arguments

TRAINING_ENTRIES = ("train.py", "train_async.py")


@dataclasses.dataclass(frozen=True)
class Context:
    """`entry` is the program that asks; `given` and `broken` are field names.

    `given` were on the command line; `broken` have a problem already, so that a rule about them would only repeat it.
    """

    entry: str
    given: frozenset[str] = frozenset()
    broken: frozenset[str] = frozenset()

    @property
    def is_training(self) -> bool:
        """True for the training programs, False for a tool that needs the model's description alone."""
        return self.entry in TRAINING_ENTRIES


# A rule yields one problem for everything that breaks it, and nothing where its own needs are not given.
Rule = Callable[[Arguments, Context], Iterable[Problem]]
