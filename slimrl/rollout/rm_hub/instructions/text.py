"""Words, sentences and paragraphs of a response, and the relations that instructions count with."""

from __future__ import annotations

import re

_WORD = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"([.!?]+)([\"')\]*_”’]*)(?=\s|$)")
_ABBREVIATIONS = {
    "mr", "mrs", "ms", "dr", "prof", "rev", "gen", "sen", "rep", "st", "jr", "sr", "inc", "ltd", "co", "corp", "vs",
    "etc", "e.g", "i.e", "fig", "no", "vol", "approx", "u.s", "u.k", "a.m", "p.m", "ph.d", "jan", "feb", "mar", "apr",
    "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec",
}  # fmt: skip
_AT_LEAST = {"at least", "more than or equal to", ">="}
_LESS_THAN = {"less than", "fewer than", "<"}
_AT_MOST = {"at most", "<="}
_MORE_THAN = {"more than", ">"}
_EXACTLY = {"exactly", "equal to", "==", "="}


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores."""
    return _WORD.findall(text)


def sentences(text: str) -> list[str]:
    """The sentences, split behind `.`, `!` and `?` where a new one can start, and at blank lines."""
    found = []
    for block in re.split(r"\n\s*\n", text):
        start = 0
        for match in _SENTENCE_END.finditer(block):
            rest = block[match.end() :].lstrip()
            if match[1] == "." and (_abbreviates(block[: match.start()]) or rest[:1].islower()):
                continue
            found.append(block[start : match.end()].strip())
            start = match.end()
        found.append(block[start:].strip())
    return [sentence for sentence in found if _WORD.search(sentence)]


def paragraphs(text: str, separator: str = r"\n\s*\n") -> list[str]:
    """The parts between separators that are not blank."""
    return [part.strip() for part in re.split(separator, text) if part.strip()]


def holds(count: int, relation: str, wanted: int) -> bool:
    """Whether `count` stands in `relation` to `wanted`. Raises ValueError on a relation that is not known."""
    relation = relation.strip().casefold()
    for names, verdict in (
        (_AT_LEAST, count >= wanted),
        (_LESS_THAN, count < wanted),
        (_AT_MOST, count <= wanted),
        (_MORE_THAN, count > wanted),
        (_EXACTLY, count == wanted),
    ):
        if relation in names:
            return verdict
    raise ValueError(f"the relation {relation!r} is not known: use 'at least', 'less than', 'at most' or 'exactly'")


def occurrences(text: str, phrase: str) -> int:
    """How often a word or phrase stands in the text as such, whatever its case."""
    return len(re.findall(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE))


def _abbreviates(before: str) -> bool:
    word = before.rsplit(None, 1)[-1].casefold().lstrip("(\"'*") if before.split() else ""
    return word in _ABBREVIATIONS or re.search(r"(?<!\w)[A-HJ-Z]$", before) is not None
