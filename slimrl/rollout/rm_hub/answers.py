"""Comparing two short answers without a computer algebra system: normalised spelling and exact rational numbers.

Decides what it is sure of and says so when it is not; every operation is linear in the answer's length.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_COMPARED_CHARS = 500

_REMOVED = re.compile(r"\\[!,;:>]|\\ |~|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\\\$|\s+")
_DEGREES = re.compile(r"\^\{?\\circ\}?")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\{([^{}]*)\}")
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_DECIMAL = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)")
_RATIO = re.compile(r"([+-]?)(?:\\frac\{([+-]?\d+)\}\{([+-]?\d+)\}|\\frac(\d)(\d)|(\d+)/(\d+))")
_WORDS = re.compile(r"[A-Za-z]{3,}")
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def normalized(answer: str) -> str:
    """One spelling for answers that differ only in LaTeX layout: spaces, delimiters, sizes, units of angle."""
    text = answer.strip().rstrip(".").strip()
    for opening, closing in _DELIMITERS:
        if len(text) >= len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : len(text) - len(closing)].strip()
    whole = _WRAPPED.fullmatch(text)
    if whole is not None:
        text = whole[1]
    text = _DEGREES.sub("", _REMOVED.sub("", text))
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\%", "%")
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    return text.casefold() if _WORDS.fullmatch(text) else text


def rational(text: str) -> Fraction | None:
    """The exact value of a normalised whole number, decimal, `a/b` or `\\frac{a}{b}`; None for anything else."""
    if _DECIMAL.fullmatch(text):
        return Fraction(text.rstrip(".") if text.endswith(".") else text)
    match = _RATIO.fullmatch(text)
    if match is None:
        return None
    sign, *parts = match.groups()
    numerator, denominator = (int(part) for part in parts if part is not None)
    if denominator == 0:
        return None
    value = Fraction(numerator, denominator)
    return -value if sign == "-" else value


def compare(answer: str, label: str) -> bool | None:
    """True or False where that is certain; None where algebra has to decide.

    Equal spellings and equal rationals are equal; two different whole numbers or words, and answers of more than
    `MAX_COMPARED_CHARS` characters that are not spelled alike, are not.
    """
    answer, label = normalized(answer), normalized(label)
    if not answer or not label:
        return False
    if answer == label:
        return True
    if len(answer) > MAX_COMPARED_CHARS or len(label) > MAX_COMPARED_CHARS:
        return False
    if _WORDS.fullmatch(answer) and _WORDS.fullmatch(label):
        return False  # algebra would read a word as a product of letters: "listen" = "silent"
    values = rational(answer), rational(label)
    if values[0] is None or values[1] is None:
        return None
    if values[0] == values[1]:
        return True
    return False if values[0].denominator == values[1].denominator == 1 else None
