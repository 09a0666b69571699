"""The type of a rule, and the context that it gets besides the arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from slimrl.arguments.flag import Problem
from slimrl.arguments.namespace import Arguments

TRAINING_ENTRIES = ("train.py", "train_async.py")


@dataclasses.dataclass(frozen=True)
class Context:
    """`entry` is the program that checks; `given` and `broken` are field names.

    `given` were on the command line; `broken` already have a problem, which a rule about them would only repeat.
    """

    entry: str
    given: frozenset[str] = frozenset()
    broken: frozenset[str] = frozenset()

    @property
    def is_training(self) -> bool:
        """True for the training programs, False for a tool that reads only the model flags."""
        return self.entry in TRAINING_ENTRIES


# A rule yields one problem per violation, and nothing if the values that it needs are missing.
Rule = Callable[[Arguments, Context], Iterable[Problem]]


def absent(path: Path, kind: str = "folder") -> str:
    """Why `path` is not a `kind`, with the part that exists: "does not exist (only /data of it does)"."""
    if path.exists():
        return f"is not a {kind}"
    parent = next((parent for parent in path.absolute().parents if parent.is_dir()), Path("/"))
    return f"does not exist (only {parent} of it does)"


def missing(args: Arguments, context: Context, names: Sequence[str]) -> list[str]:
    """The flags of these fields that were not given, except those with a rejected value."""
    values = vars(args)
    return ["--" + name.replace("_", "-") for name in names if values[name] is None and name not in context.broken]
