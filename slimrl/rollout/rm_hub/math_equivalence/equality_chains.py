"""Checks the arithmetic in a chain of equalities: `2(3) + 4 = 10` holds, `5 = 6` does not.

Only plain arithmetic is evaluated, in time bounded by its digits; everything else counts as holding.
"""

from __future__ import annotations

import dataclasses
import math
import re
from fractions import Fraction
from itertools import pairwise
from typing import Any

from slimrl.rollout.rm_hub.math_equivalence import parse
from slimrl.rollout.rm_hub.math_equivalence.quantities import measure, rational, split_unit

MAX_DEPTH = 30
MAX_BITS = 20_000
MAX_FACTORIAL = 500
_CLOSE = 1e-9

_TOKEN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+|\\(?:frac|sqrt|binom|cdot|times|div)(?![a-zA-Z])|[-+*/^!(){}\[\]])\s*")
_PRODUCTS = {"*": "*", "\\cdot": "*", "\\times": "*", "/": "/", "\\div": "/"}
_PAIRS = {"(": ")", "{": "}", "[": "]"}
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_MODULUS = re.compile(r"\(?\s*(?:\\[pb]?mod|\\text\s*\{\s*mod\s*\}|\bmod)\s*\{?\s*0*([1-9]\d*)\s*\}?\s*\)?\s*$")
_MIXED = re.compile(r"\d\s*\\frac")
_PLAIN_NUMBER = re.compile(r"[-+]?\s*[\d.,]+")

Number = Fraction | float


@dataclasses.dataclass(frozen=True)
class _Quantity:
    """The value of a term, its unit, and its text without the unit."""

    value: Number
    unit: str | None
    text: str


def holds(answer: str) -> bool:
    """Whether all terms of a chain of equalities (output of `clean`) have the same value.

    Terms after the first rounding sign are not checked; for values modulo a number the remainders are compared.
    """
    chain = parse.relation(answer)
    if chain is None:
        return True
    exact = next((index for index, sign in enumerate(chain.signs) if sign != "="), len(chain.signs))
    terms, modulus = chain.terms[: exact + 1], 0
    congruent = _MODULUS.search(terms[-1])
    if congruent is not None:
        modulus, terms[-1] = int(congruent[1]), terms[-1][: congruent.start()]
    quantities = [quantity for term in terms if (quantity := _quantity(term)) is not None]
    try:
        return all(_agree(one, other, modulus) for one, other in pairwise(quantities))
    except OverflowError:  # a root next to a number too large for floating point
        return True


def value(text: str) -> Number | None:
    """The value of plain arithmetic, exact unless it has roots; None for anything else and for too large numbers."""
    if not _MIXED.search(text) and (number := rational(text)) is not None:
        return number
    if _MIXED.search(text):
        return None  # `2\\frac{1}{2}` may be a mixed number or a product
    tokens, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        tokens.append(match[1])
        position = match.end()
    try:
        return _Reader(tokens).whole()
    except (ValueError, ArithmeticError):
        return None


def _quantity(term: str) -> _Quantity | None:
    words = {word.strip().casefold() for word in _TEXT.findall(term) if word.strip()}
    text, unit = split_unit(_TEXT.sub(" ", term).strip())
    number = value(text)
    if number is None or len(words) + (unit is not None) > 1:
        return None
    return _Quantity(number, words.pop() if words else unit, text)


def _agree(one: _Quantity, other: _Quantity, modulus: int) -> bool:
    if one.unit != other.unit and _may_be_converted(one, other):
        return True
    difference: Any = abs(one.value - other.value)
    if difference == 0:
        return True
    if not isinstance(difference, Fraction) and difference <= _CLOSE * max(1.0, abs(float(one.value))):
        return True
    if modulus:
        return not isinstance(difference, Fraction) or difference % modulus == 0
    places = max(len(part.text.partition(".")[2]) for part in (one, other))
    if places and None in (rational(one.text), rational(other.text)):
        return True  # the decimals may have been rounded
    return places > 0 and difference * 2 <= Fraction(1, 10**places)


def _may_be_converted(one: _Quantity, other: _Quantity) -> bool:
    """Whether two sides with different units may be the same quantity: `2 hours = 120`, `50\\% = 0.5`."""
    if one.unit is not None and other.unit is not None:
        return measure(one.unit) != measure(other.unit)
    unit = one.unit or other.unit
    if unit is not None and measure(unit)[0] in ("share", "angle"):
        return True
    return one.unit is not None and _PLAIN_NUMBER.fullmatch(one.text) is not None


class _Reader:
    """Evaluates sums of products of powers by recursive descent; raises ValueError if it is not plain arithmetic."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.position, self.depth = [*tokens, ""], 0, 0

    def whole(self) -> Number:
        total = self._sum()
        self._expect("")
        return total

    def _next(self) -> str:
        return self.tokens[self.position]

    def _take(self) -> str:
        self.position += 1
        return self.tokens[self.position - 1]

    def _expect(self, token: str) -> None:
        if self._next() != token:
            raise ValueError(f"found {self._next()!r}, expected {token!r}")
        self.position += 1

    def _sum(self) -> Number:
        total = self._product()
        while self._next() in ("+", "-"):
            total = _bounded(total + self._product() if self._take() == "+" else total - self._product())
        return total

    def _product(self) -> Number:
        total, divided = self._power(), False
        while True:
            if (sign := _PRODUCTS.get(self._next())) is not None:
                self._take()
                factor = self._power()
                divided = divided or sign == "/"
                total = _bounded(total * factor if sign == "*" else total / factor)
            elif self._next() in ("(", "{", "[") or self._next().startswith(("\\frac", "\\sqrt", "\\binom")):
                if divided:
                    raise ValueError("`6/2(3)` is ambiguous")
                total = _bounded(total * self._power())
            else:
                return total

    def _power(self) -> Number:
        sign = 1
        while self._next() in ("+", "-"):
            sign = sign if self._take() == "+" else -sign
        base = self._atom()
        while self._next() == "!":
            self._take()
            if base != int(base) or not 0 <= base <= MAX_FACTORIAL or self._next() == "!":
                raise ValueError("no factorial")
            base = Fraction(math.factorial(int(base)))
        if self._next() != "^":
            return sign * base
        self._take()
        exponent = self._atom()
        if self._next() in ("^", "!"):
            raise ValueError("a power of a power is ambiguous")
        return sign * _raised(base, exponent)

    def _atom(self) -> Number:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError("brackets are nested too deep")
        token = self._take()
        if token in _PAIRS:
            inner = self._sum()
            self._expect(_PAIRS[token])
        elif token == "\\frac":
            inner = self._group() / self._group()
        elif token == "\\sqrt":
            degree = self._group("[") if self._next() == "[" else Fraction(2)
            inner = _raised(self._group(), 1 / degree)
        elif token == "\\binom":
            inner = _binomial(self._group(), self._group())
        elif token[:1].isdigit() or token[:1] == ".":
            inner = Fraction(token.removesuffix("."))
        else:
            raise ValueError(f"{token!r} is not a number")
        self.depth -= 1
        return inner

    def _group(self, opening: str = "{") -> Number:
        self._expect(opening)
        inner = self._sum()
        self._expect(_PAIRS[opening])
        return inner


def _bounded(number: Number) -> Number:
    if isinstance(number, Fraction) and max(map(int.bit_length, number.as_integer_ratio())) > MAX_BITS:
        raise ValueError("the number has too many digits")
    return number


def _raised(base: Number, exponent: Number) -> Number:
    """A power; exact for integer exponents and rational roots."""
    if not isinstance(base, Fraction) or not isinstance(exponent, Fraction):
        return _real(float(base) ** float(exponent))
    if exponent.denominator == 1:
        bits = max(map(int.bit_length, base.as_integer_ratio()))
        if bits * abs(exponent) > MAX_BITS:
            raise ValueError("the number has too many digits")
        return base**exponent.numerator
    root = _real(float(base) ** float(exponent))
    near = Fraction(root).limit_denominator(10_000)
    return near if near and abs(exponent.numerator) < 100 and _is_power(near, base, exponent) else root


def _is_power(root: Fraction, base: Fraction, exponent: Fraction) -> bool:
    return exponent.denominator < 100 and root**exponent.denominator == base**exponent.numerator


def _real(number: float | complex) -> float:
    if isinstance(number, complex) or not math.isfinite(number):
        raise ValueError("no real number")
    return number


def _binomial(whole: Number, part: Number) -> Fraction:
    if whole != int(whole) or part != int(part) or not 0 <= part <= whole <= MAX_FACTORIAL:
        raise ValueError("no binomial coefficient")
    return Fraction(math.comb(int(whole), int(part)))
