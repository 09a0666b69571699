"""Word overlap of two answers in plain language: the F1 score of the SQuAD evaluation (Rajpurkar et al., 2016)."""

from __future__ import annotations

import re
import string
from collections import Counter

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = {"yes", "no", "noanswer"}


def f1(answer: str, label: str) -> float:
    """2 PR / (P + R) over the words of both, counted with repeats, in [0, 1].

    Case, punctuation and articles do not count. Where one side is just yes, no or noanswer, the other has to be too.
    """
    words, expected = normalized(answer), normalized(label)
    if words == expected:
        return 1.0
    if {" ".join(words), " ".join(expected)} & _CLOSED:
        return 0.0
    shared = sum((Counter(words) & Counter(expected)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(words), shared / len(expected)
    return 2 * precision * recall / (precision + recall)


def normalized(text: str) -> list[str]:
    """The words that count."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
