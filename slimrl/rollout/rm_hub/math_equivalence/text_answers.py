"""Answers in words: choices, names, yes and no, number words, and sentences for "there is none"."""

from __future__ import annotations

import re
from fractions import Fraction

_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_MATH = re.compile(r"[\\^_=<>+*/{}|]")
_SEPARATORS = re.compile(r"(?:[\s,.;:!?'\"()\[\]`]|-(?!\d)|(?<=\w)-)+")  # keeps the sign of a number
_NO_WORDS = {"and", "sin", "cos", "tan", "log", "cot", "sec", "csc", "gcd", "lcm", "max", "min", "mod"}
_ARTICLES = {"a", "an", "the"}
_CHOICE = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice)\s+)?(?:\(([A-Za-z])\)|([A-Z])(?=[.):]))[.):]*\s*(\S.*)?")
_NAMED_CHOICE = re.compile(r"(?:option|choice)\s+([A-Za-z])", re.IGNORECASE)
_PLAIN_CHOICE = re.compile(r"[A-Ja-j]")
_SAME = {
    "dne": "does not exist", "no solutions": "no solution", "no real solutions": "no solution",
    "no real solution": "no solution", "there is no solution": "no solution", "there are no solutions": "no solution",
    "none": "no solution", "none exist": "no solution", "none exists": "no solution",
    "it does not exist": "does not exist",
    "doesn t exist": "does not exist", "impossible": "impossible", "not possible": "impossible",
    "infinite": "infinitely many", "infinite number": "infinitely many", "half": "one half", "not defined": "undefined",
    "cannot be determined": "not enough information", "can not be determined": "not enough information",
    "all reals": "all real numbers", "empty set": "no solution",
}  # fmt: skip
_ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_PARTS = {
    "half": 2, "halves": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
    "ninth": 9, "tenth": 10,
}  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def as_words(text: str) -> str | None:
    """The normalized words of an answer in words: without case, articles and punctuation. None for other answers.

    `text` is the output of `clean`.
    """
    marked = "\\text" in text
    plain = _TEXT.sub(r" \1 ", text)
    if _MATH.search(plain):
        return None
    words = [word for word in _SEPARATORS.split(plain.casefold()) if word]
    if len(words) > 1:
        words = [word for word in words if word not in _ARTICLES] or words
    if not any(_is_word(word) for word in words) and not (marked and any(_says_something(word) for word in words)):
        return None
    joined = " ".join(words).removeprefix("set of ")
    return _SAME.get(joined, joined)


def _is_word(word: str) -> bool:
    return (len(word) > 2 and word.isalpha() and word not in _NO_WORDS) or word in ("am", "pm")


def _says_something(word: str) -> bool:
    """Whether a word is neither a number nor a conjunction."""
    return word not in ("and", "or") and not word.lstrip("+-").isdecimal()


def plain(text: str) -> str:
    """The text without `\\text` commands, spaces and case."""
    return "".join(_TEXT.sub(r"\1", text).split()).casefold()


def choice(text: str) -> tuple[str, str] | None:
    """The letter of a multiple-choice answer such as `B`, `(B)`, `B.` or `(B) 5`, and the text after it."""
    shown = _TEXT.sub(r"\1", text).strip()
    if _PLAIN_CHOICE.fullmatch(shown):
        return shown.upper(), ""
    named = _NAMED_CHOICE.fullmatch(shown)
    if named is not None:
        return named[1].upper(), ""
    match = _CHOICE.fullmatch(shown)
    return None if match is None else ((match[1] or match[2]).upper(), (match[3] or "").strip())


def with_digits(words: str) -> str:
    """The words with a leading number in digits, `six feet` as `6 feet`."""
    parts = words.split()
    if parts[0] not in _ONES and parts[0] not in _TENS:
        return words
    for count in range(len(parts) - 1, 0, -1):
        value = number_word(" ".join(parts[:count]))
        if value is not None:
            return " ".join([str(value), *parts[count:]])
    return words


def number_word(words: str) -> Fraction | None:
    """The value of a number word up to 999,999; None if it is not a number word."""
    parts = words.split()
    part = _PARTS.get(parts[-1]) or _PARTS.get(parts[-1].removesuffix("s")) if len(parts) == 2 else None
    if part is not None and parts[0] in _ONES:
        return Fraction(_ONES.index(parts[0]), part)
    thousands, found, rest = words.partition(" thousand")
    if found:
        high, low = _below_thousand(thousands), _below_thousand(rest.strip()) if rest.strip() else Fraction(0)
        return None if high is None or low is None else 1000 * high + low
    return _below_thousand(words)


def _below_thousand(words: str) -> Fraction | None:
    hundreds, found, rest = words.partition(" hundred")
    if found:
        high, low = _below_hundred(hundreds), _below_hundred(rest.removeprefix(" and").strip() or "zero")
        return None if high is None or low is None or not 0 < high < 10 else 100 * high + low
    return _below_hundred(words)


def _below_hundred(words: str) -> Fraction | None:
    parts = words.split()
    if len(parts) == 1 and parts[0] in _ONES:
        return Fraction(_ONES.index(parts[0]))
    if parts and parts[0] in _TENS and len(parts) <= 2:
        ones = _ONES.index(parts[1]) if len(parts) == 2 and parts[1] in _ONES[1:10] else None
        if len(parts) == 1 or ones is not None:
            return Fraction(10 * (_TENS.index(parts[0]) + 2) + (ones or 0))
    return None
