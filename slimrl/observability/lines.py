"""The lines of steps and evaluations as a terminal shows them: whole in the log file, within its width here."""

from __future__ import annotations

from slimrl.observability.logs import TERMINAL_WIDTH

_BETWEEN = " | "
_TOTAL = "total "  # the last of the phases' seconds
# Parts of a step's line by their first word, in the order in which they are left out; all others stay.
_LEFT_OUT = ("kl", "grad", "loss", "diff")
_CUT = "..."


def short_step(line: str, width: int = TERMINAL_WIDTH) -> str:
    """A line of `step_line` with two digits and the seconds in all, as far as it fits in `width`; warnings stay."""
    parts = []
    for part in line.split(_BETWEEN):
        first = part.split(" ", 1)[0]
        if first == "version":
            continue
        parts.append(part.rpartition(_TOTAL)[2] if first == "generate" else _two_digits(part))
    for word in _LEFT_OUT:
        if len(_BETWEEN.join(parts)) > width:
            parts = [part for part in parts if not part.startswith(f"{word} ")]
    return _cut(_BETWEEN.join(parts), width)


def short_evaluation(line: str, width: int = TERMINAL_WIDTH) -> str:
    """An evaluation's line; where it is too long, without what is in parentheses beside the scores."""
    if len(line) > width:
        line = _BETWEEN.join(part.partition(" (")[0] for part in line.split(_BETWEEN))
    return _cut(line, width)


def _two_digits(part: str) -> str:
    label, _, number = part.removeprefix("logprob ").rpartition(" ")
    return f"{label} {float(number):.2g}" if label in _LEFT_OUT else part


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - len(_CUT)] + _CUT
