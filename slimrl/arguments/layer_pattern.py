"""Which layers are of a kind: `2` (every second) or an expression like `[0]*3+[1]*45` (one 0 or 1 per layer).

The expression is read, never run: brackets with whole numbers, each list repeated by `*` and joined by `+`.
"""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\d+")
_EXPRESSION = re.compile(r"\(?(\[[\d,]*\](\*\d+)?(\+\[[\d,]*\](\*\d+)?)*)\)?(\*\d+)?")
_TERM = re.compile(r"\[([\d,]*)\](?:\*(\d+))?")
_MAX_LAYERS = 100_000  # far above any model; stops a slip of the finger from filling the memory


def layer_pattern(text: str) -> int | list[int]:
    """The number, or the list that the expression describes. Raises ValueError worded for `<flag> <text> ...`."""
    compact = re.sub(r"\s", "", text)
    if _NUMBER.fullmatch(compact):
        if int(compact) == 0:
            raise ValueError("is too small: it must be at least 1")
        return int(compact)
    match = _EXPRESSION.fullmatch(compact)
    if match is None:
        raise ValueError("is neither a whole number nor an expression such as [0]*3+[1]*45")
    pattern: list[int] = []
    for numbers, times in _TERM.findall(match.group(1)):
        pattern += _repeated([int(number) for number in numbers.split(",") if number], times)
    pattern = _repeated(pattern, (match.group(5) or "*1")[1:])
    if not pattern or set(pattern) - {0, 1}:
        raise ValueError("is not a list of 0 and 1, one for each layer")
    return pattern


def _repeated(numbers: list[int], times: str) -> list[int]:
    count = int(times or 1)
    if len(numbers) * count > _MAX_LAYERS:
        raise ValueError(f"describes more than {_MAX_LAYERS} layers")
    return numbers * count
