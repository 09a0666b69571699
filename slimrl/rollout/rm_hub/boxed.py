"""Finding the final answer of a response: the content of its last `\\boxed{...}`."""

from __future__ import annotations

_MARKERS = ("\\boxed", "\\fbox")


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` or `\\fbox{...}` (or `\\boxed 5`), None where there is none.

    A last box that is never closed (a truncated response) counts as no answer. Time linear in the text.
    """
    start, marker = max((text.rfind(marker), marker) for marker in _MARKERS)
    if start < 0:
        return None
    rest = text[start + len(marker) :]
    if rest.startswith(" "):
        words = rest.split("$", 1)[0].split(maxsplit=1)
        return words[0] if words and not words[0].startswith("{") else None
    if not rest.startswith("{"):
        return None
    depth = 0
    for position, character in enumerate(rest):
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return rest[1:position].strip()
    return None
