"""Numbers that functions of the user's return, as plain ones: numpy's and torch's scalars do not reach JSON."""

from __future__ import annotations

from typing import Any


def plain_number(value: Any) -> float:
    """A number, or a scalar of numpy or torch, as a float. Raises TypeError for anything else, texts too."""
    if isinstance(value, str | bytes | None):
        raise TypeError(f"{value!r} is not a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # the last for a tensor of several
        raise TypeError(f"{value!r} is not a number") from error
