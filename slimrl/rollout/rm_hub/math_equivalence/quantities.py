"""Numbers and units in math answers: exact rationals, and units or currencies that are split off and converted.

Numbers are integers, decimals, fractions, mixed numbers and powers of ten. No number has more digits than its spelling,
except powers of ten, which are bounded.

The table has the units of short answers. Its units are converted; others are compared as words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

_LENGTHS = {
    "mm millimeter millimetre": "1/1000", "cm centimeter centimetre": "1/100", "dm decimeter decimetre": "1/10",
    "m meter metre": "1", "km kilometer kilometre": "1000", "in inch inche": "127/5000", "ft foot feet": "381/1250",
    "yd yard": "1143/1250", "mi mile": "201168/125", "nm nanometer nanometre": "1/1000000000",
    "um micrometer micrometre": "1/1000000",
}  # fmt: skip
_TIMES = {
    "ms millisecond": "1/1000", "s sec second": "1", "min minute": "60", "h hr hour": "3600", "day": "86400",
    "wk week": "604800", "month": None, "yr year": None,
}  # fmt: skip
_MASSES = {
    "mg milligram": "1/1000000", "g gram": "1/1000", "kg kilogram": "1", "t ton tonne": "1000",
    "lb pound": "45359237/100000000", "oz ounce": "45359237/1600000000",
}  # fmt: skip
_OTHERS: dict[str, Mapping[str, str | None]] = {
    "angle": {"deg degree \\circ": "1", "rad radian": None},
    "money": {
        "$ dollar usd": "1",
        "cent \\cent ¢": "1/100",
        "€ euro eur": None,
        "£ gbp": None,
        "rupee ₹ rs inr": None,
        "¥ yen yuan": None,
    },
    "share": {"%": "1", "percent": "1", "percentage": "1"},
    "litre": {"ml milliliter millilitre": "1/1000", "l liter litre": "1", "gallon gal": None},
    "energy": {"j joule": "1", "kj kilojoule": "1000"},
    "power": {"w watt": "1", "kw kilowatt": "1000"},
    "force": {"n newton": "1"},
    "tension": {"v volt": "1"},
    "current": {"a amp ampere": "1", "ma": "1/1000"},
    "frequency": {"hz hertz": "1", "khz": "1000"},
    "pressure": {"pa pascal": "1", "kpa": "1000"},
    "heat": {"k kelvin": "1"},
    "amount": {"mol mole": "1"},
    "speed": {"mph": "1", "mi/h": "1", "kph kmh kmph": "25146/15625"},
}
# Single letters and words that are more often a variable, a name or a list are units only if marked as such.
_NEEDS_SPACE = re.compile(r"[a-z]{1,2}")

_TEXT_UNIT = re.compile(r"\\text\{\s*([^{}\\]*?)\s*\}")
_UNIT_POWER = r"(?:\^\{?-?\d\}?)?"
_TAIL = re.compile(rf"\s*((?:\\text\{{[^{{}}]*\}}{_UNIT_POWER}(?:[\s/]|\\cdot(?![a-z]))*)+)$")
_PLAIN_TAIL = re.compile(
    rf"(?<=[\d)}}\s])\s*((?:[A-Za-z]+{_UNIT_POWER})(?:(?:\s+|\s*/\s*)(?:[A-Za-z]+{_UNIT_POWER}))*)$"
)
_SYMBOL_TAIL = re.compile(r"\s*(%|\^\\circ\s*[CF]?|\\cent|[€£¥₹¢$]|(?<=[\d\s}])\\Omega)$")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_MODULUS = re.compile(r"\s*(\\pmod\s*(?:\{[^{}]*\}|\w+)|\(\s*(?:(?:mod|\\bmod)\s+|\\text\s*\{\s*mod\s*\}\s*)\w+\s*\))$")
_CURRENCY_HEAD = re.compile(
    r"([+-]?)\s*(?:(?:\\\$|\$|USD\s|US\\?\$)|(€|£|¥|₹|EUR(?=\s)|GBP(?=\s)|INR(?=\s)|Rs(?=\.|\s))\.?)\s*(?=[\d.\\])"
)
_INVERSE = re.compile(r"\s*(?:\\cdot\s*)?(?<=[\s}])([A-Za-z]+)\^\{?-(\d)\}?")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
_SUMMAND = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")
_SUM = re.compile(rf"{_SUMMAND.pattern}(?:\s*(?:,|and)?\s*{_SUMMAND.pattern}){{1,3}}")
_SQUARE = re.compile(r"^(?:square|sq\.?)\s+(\w+)|(\w+)\s+squared$")
_CUBIC = re.compile(r"^(?:cubic|cu\.?)\s+(\w+)|(\w+)\s+cubed$")

Measure = tuple[str, Fraction | None]  # kind, and size in the kind's base unit; a kind without sizes is a name


def split_unit(text: str) -> tuple[str, str | None]:
    """The value and the unit as written (None if absent) of an answer, an output of `clean`."""
    head = _CURRENCY_HEAD.match(text)
    if head is not None:
        return head[1] + text[head.end() :], (head[2] or "$").casefold()
    if text[:1].isdigit() and (summed := _summed(text)) is not None:
        return summed
    for pattern in (_SYMBOL_TAIL, _TAIL, _MODULUS):
        tail = pattern.search(text)
        if tail is not None and tail.start() > 0:
            value, unit = text[: tail.start()].rstrip(" \\,"), _TEXT_UNIT.sub(r" \1", tail[1]).strip()
            if not value or not unit or (unit.startswith("^") and _FUNCTION.search(value)):
                return text, None
            return value, unit
    tail = _PLAIN_TAIL.search(text)
    if tail is not None and _is_plain_unit(text, tail):
        return text[: tail.start()].rstrip(), tail[1]
    return text, None


def _summed(text: str) -> tuple[str, str] | None:
    """The sum of `2 hours 30 minutes` or `5 feet, 6 inches` in the first unit; None for anything else."""
    plain = _TEXT_UNIT.sub(r" \1 ", text)
    if _SUM.fullmatch(plain.strip()) is None:
        return None
    parts = [(Fraction(value), unit, *measure(unit)) for value, unit in _SUMMAND.findall(plain)]
    sizes = [size for *_, size in parts if size is not None]
    if len({kind for _, _, kind, _ in parts}) > 1 or len(sizes) < len(parts):
        return None
    total = sum((part[0] * size for part, size in zip(parts, sizes, strict=True)), Fraction(0)) / sizes[0]
    return (str(total.numerator) if total.denominator == 1 else f"{total.numerator}/{total.denominator}"), parts[0][1]


def conversion(first: str, second: str) -> Fraction | None:
    """The number of `second` in one `first`; None for different kinds of units or different words."""
    one, other = measure(first), measure(second)
    if one[0] != other[0]:
        return None
    if one[1] is None or other[1] is None:
        return Fraction(1) if one == other else None
    return one[1] / other[1]


def measure(unit: str) -> Measure:
    """The kind and size of a unit."""
    text = re.sub(r"\s+", " ", unit.replace("^\\circ", "\\circ")).strip(" .").replace("per ", "/")
    text = re.sub(r"\s*/\s*", "/", _INVERSE.sub(_divided, text))
    if text in _TABLE:
        return _TABLE[text]
    parts = text.split("/")
    sizes = [_simple(part.strip()) for part in parts]
    if len(parts) == 1:
        return sizes[0]
    kind = "/".join(kind for kind, _ in sizes)
    size = sizes[0][1]
    for _, divisor in sizes[1:]:
        size = None if size is None or divisor is None else size / divisor
    return (kind, size) if size is not None else (f"{kind}:{text.casefold()}", None)


def _divided(match: re.Match[str]) -> str:
    """`s^-1` as `/s`, `s^-2` as `/s^2`."""
    return f"/{match[1]}" + (f"^{match[2]}" if match[2] != "1" else "")


def _simple(text: str) -> Measure:
    power = 1
    for pattern, exponent in ((_SQUARE, 2), (_CUBIC, 3)):
        match = pattern.search(text)
        if match is not None:
            text, power = match[1] or match[2], exponent
    raised = re.fullmatch(r"(.*?)\s*\^\{?(-?\d)\}?", text)
    if raised is not None:
        text, power = raised[1], int(raised[2])
    kind, size = _TABLE.get(text) or _TABLE.get(_singular(text)) or (_singular(text), None)
    if power == 1:
        return kind, size
    return f"{kind}^{power}", None if size is None else size**power


def _singular(word: str) -> str:
    word = word.casefold().strip(" .")
    return word[:-1] if len(word) > 2 and word.endswith("s") and not word.endswith("ss") else word


def _is_plain_unit(text: str, tail: re.Match[str]) -> bool:
    """Whether letters after a number, not marked as text, are a unit: known ones, or two words and more."""
    words = re.sub(_UNIT_POWER, "", tail[1]).replace("/", " ").split()
    before = text[: tail.start()].rstrip()
    if not before or not (before[-1].isdigit() or before[-1] in ")}") or "\\" in tail[1]:
        return False
    if len(tail[1]) == 1 and not before[-1].isdigit():
        return False  # `\\sum_{k=1}^{10} k`
    if all(len(word) == 1 for word in words) and _LETTER.search(before):
        return False  # `v_0 t`
    known = all(word in _TABLE or _singular(word) in _TABLE or word.casefold() in _JOINING for word in words)
    spaced = text[tail.start() : tail.start(1)] != "" or text[tail.start() - 1] == " "
    if known:
        return spaced or all(len(word) > 1 for word in words)
    return spaced and all(len(word) > 2 for word in words)


def _table() -> dict[str, Measure]:
    groups: dict[str, Mapping[str, str | None]] = {"length": _LENGTHS, "time": _TIMES, "mass": _MASSES, **_OTHERS}
    table: dict[str, Measure] = {}
    for kind, units in groups.items():
        for names, size in units.items():
            first = names.split()[0]
            for name in names.split():
                table[name] = (kind, Fraction(size)) if size is not None else (f"{kind}:{first}", None)
    table["kph"] = table["kmh"] = table["kmph"] = ("length/time", Fraction(1000, 3600))
    table["mph"] = ("length/time", Fraction("201168/125") / 3600)
    table["rpm"] = ("rpm", None)
    return {**table, **{name.upper(): table[name] for name in ("l", "j", "w", "n", "v", "a", "k", "pa", "hz", "kg")}}


_TABLE = _table()
_JOINING = {"per", "square", "sq", "cubic", "cu", "squared", "cubed", "of"}


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
    """The value of a plain number, decimal or fraction without cleaning, as most answers are."""
    return rational(text.strip().strip("$").replace("\\dfrac", "\\frac"))


def rational(text: str) -> Fraction | None:
    """The exact value of a number, an output of `clean`; None for anything else, including division by zero."""
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
        if parts[0] is None or value < 0:  # "3 1/2" is written with a space and matches `_MIXED`
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
