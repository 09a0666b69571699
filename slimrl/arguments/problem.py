"""A `Problem`: one thing wrong with a command line, said in one sentence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Problem:
    """`flag` is the flag to look at, `sentence` names its value, the rule and the mend."""

    flag: str
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def ended(text: str) -> str:
    """`text` with a full stop, unless it ends with a question."""
    return text if text.endswith("?") else text + "."


def report(problems: Sequence[Problem], entry: str) -> str:
    """Every problem, numbered, as text for a terminal."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"{entry}: {count} with the command line; nothing was started."]
    lines += [f"  {number}. {problem.sentence}" for number, problem in enumerate(problems, start=1)]
    return "\n".join(lines)
