"""Exact rational numbers as answers write them: integers, decimals, fractions, mixed numbers, powers of ten.

No number is built that has more digits than its spelling, powers of ten aside, which are bounded.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

MAX_POWER_OF_TEN = 300

_PLAIN = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(rf"([+-]*)({_PLAIN})")
_RATIO = re.compile(
    rf"([+-]*)(?:(\d+)\s*)??(?:\\frac\{{([+-]?(?:{_PLAIN}))\}}\{{([+-]?(?:{_PLAIN}))\}}|({_PLAIN})\s*/\s*([+-]?(?:{_PLAIN})))"
)
_MIXED = re.compile(r"([+-]*)(\d+)(?:\s+|\s*\+\s*)(\d+)\s*/\s*(\d+)")
_POWER = re.compile(
    rf"([+-]*)(?:({_PLAIN})\s*(?:\\times|\\cdot|\*|x)\s*)?10\s*\^\s*(?:\{{\s*([+-]?\d{{1,4}})\s*\}}|(\d))"
)
_EXPONENT = re.compile(r"([+-]*)(\d+\.?\d*|\.\d+)[eE]([+-]?\d{1,4})")
_REPEATING = re.compile(r"([+-]*)(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*\{(\d+)\}|\((\d+)\))")
_TRAILING_DOTS = re.compile(r"([+-]*)(\d*)\.(\d*?)(\d+?)\4{2,}(?:\.\.\.|\s*\\ldots)")
_MODULO = re.compile(r"(\d+)\s*\\b?mod\s*(\d+)")
_DIVISORS = re.compile(r"\\?(?:(?:text|operatorname)\s*\{\s*)?(gcd|lcm)\s*\}?\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)")
_BRACKETED = re.compile(r"([+-]*)[({]([^(){}]*)[)}]")


def at_once(text: str) -> Fraction | None:
    """The value of a plain number, decimal or fraction that needs no cleaning, which most answers are."""
    return rational(text.strip().strip("$").replace("\\dfrac", "\\frac"))


def rational(text: str) -> Fraction | None:
    """The exact value of a number spelled as `clean` leaves it; None for anything else, division by zero included."""
    text = text.strip()
    plain = _NUMBER.fullmatch(text)
    if plain is not None:
        return _signed(plain[1], _plain(plain[2]))
    for pattern, read in _FORMS:
        match = pattern.fullmatch(text)
        value = None if match is None else read(match)
        if value is not None:
            return value
    return None


def _ratio(match: re.Match[str]) -> Fraction | None:
    signs, whole, *parts = match.groups()
    numerator, denominator = (part for part in parts if part is not None)
    bottom = _any_sign(denominator)
    if bottom == 0:
        return None
    value = _any_sign(numerator) / bottom
    if whole is not None:
        if parts[0] is None or value < 0:  # "3 1/2" is written with a space, and is another pattern's
            return None
        value += int(whole)
    return _signed(signs, value)


def _mixed(match: re.Match[str]) -> Fraction | None:
    signs, whole, numerator, denominator = match.groups()
    if int(denominator) == 0:
        return None
    return _signed(signs, int(whole) + Fraction(int(numerator), int(denominator)))


def _power(match: re.Match[str]) -> Fraction | None:
    signs, factor, braced, digit = match.groups()
    return _scaled(signs, _plain(factor or "1"), int(braced or digit))


def _exponent(match: re.Match[str]) -> Fraction | None:
    return _scaled(match[1], _plain(match[2]), int(match[3]))


def _repeating(match: re.Match[str]) -> Fraction | None:
    signs, whole, fixed, *period = match.groups()
    digits = next(part for part in period if part)
    value = Fraction(int(whole + fixed or "0") + Fraction(int(digits), 10 ** len(digits) - 1), 10 ** len(fixed))
    return _signed(signs, value)


def _modulo(match: re.Match[str]) -> Fraction | None:
    return Fraction(int(match[1]) % int(match[2])) if int(match[2]) else None


def _divisors(match: re.Match[str]) -> Fraction | None:
    function = math.gcd if match[1] == "gcd" else math.lcm
    return Fraction(function(int(match[2]), int(match[3])))


def _bracketed(match: re.Match[str]) -> Fraction | None:
    value = rational(match[2])
    return None if value is None else _signed(match[1], value)


def _scaled(signs: str, value: Fraction, power: int) -> Fraction | None:
    return None if abs(power) > MAX_POWER_OF_TEN else _signed(signs, value * Fraction(10) ** power)


def _plain(text: str) -> Fraction:
    return Fraction(text.replace(",", "").removesuffix("."))


def _any_sign(text: str) -> Fraction:
    return -_plain(text[1:]) if text.startswith("-") else _plain(text.removeprefix("+"))


def _signed(signs: str, value: Fraction) -> Fraction:
    return -value if signs.count("-") % 2 else value


_FORMS = (
    (_RATIO, _ratio),
    (_MIXED, _mixed),
    (_POWER, _power),
    (_EXPONENT, _exponent),
    (_REPEATING, _repeating),
    (_TRAILING_DOTS, _repeating),
    (_MODULO, _modulo),
    (_DIVISORS, _divisors),
    (_BRACKETED, _bracketed),
)
