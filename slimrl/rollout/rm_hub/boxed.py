"""Finding the final answer of a response: the content of its last `\\boxed{...}`, and where its own text ends."""

from __future__ import annotations

import re

_UNBRACED = re.compile(r"[^\s$]+?(?=\\[)\]]|[\s$]|$)")
_SPECIAL_TOKEN = re.compile(r"(?:<[|｜][^<>|｜\s]{1,40}[|｜]>|</s>|<eos>|<end_of_turn>)$")
_END_CHARS = 1000
_MARKERS = ("\\boxed", "\\fbox")


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` or `\\fbox{...}` (or `\\boxed 5`, `\\boxed5`), None where there is none.

    A last box that is never closed (a truncated response) counts as no answer. Time linear in the text.
    """
    start, marker = max((text.rfind(marker), marker) for marker in _MARKERS)
    if start < 0:
        return None
    after = text[start + len(marker) :]
    rest = after.lstrip()
    if not rest.startswith("{"):
        # letters behind the marker make another command of it
        word = None if after[:1].isalpha() else _UNBRACED.match(rest)
        return None if word is None else word[0]
    depth = 0
    for position, character in enumerate(rest):
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return rest[1:position].strip()
    return None


def without_special_tokens(text: str) -> str:
    """The text without the tokens, such as `<|im_end|>`, by which a model ends it."""
    start, end = text[:-_END_CHARS], text[-_END_CHARS:].rstrip()
    while (token := _SPECIAL_TOKEN.search(end)) is not None:
        end = end[: token.start()].rstrip()
    return start + end
