"""Parses the structure of an answer: lists, sets, tuples, matrices, relations; their elements stay text.

A set of real numbers is a union of intervals. The input is the output of `normalize.clean`. Every function takes linear
time and returns None if the text does not have the structure.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from slimrl.rollout.rm_hub.math_equivalence.quantities import rational

_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)
_OPENING = {"(", "[", "{", "\\{", "\\langle", "\\lfloor", "\\lceil", "\\begin"}
_CLOSING = {")", "]", "}", "\\}", "\\rangle", "\\rfloor", "\\rceil", "\\end"}
_ENDS = {"(": ")]", "[": ")]", "\\{": "\\}", "\\langle": "\\rangle", "{": "}"}
_JOINED = re.compile(r"\s*,?\s*\\text\s*\{\s*,?\s*(and|or)\s*\}\s*|\s*,?\s+(and|or)\s+")
_MATRIX = re.compile(
    r"(?:\\?[(\[{]\s*)?\\begin\s*\{(p|b|B|small|)(?:matrix|array)\}\s*(?:\{[lcr|\s]*\})?(.*?)\\end\s*\{[a-zA-Z]*\}\s*(?:\\?[)\]}])?",
    re.DOTALL,
)
_NESTED_ROWS = re.compile(r"\[\s*(\[[^\[\]]*\](?:\s*,\s*\[[^\[\]]*\])*)\s*\]")
_CASES = re.compile(
    r"(?:\\?\{\s*)?\\begin\s*\{(?:cases|aligned|align\*?|array)\}(?:\{[lcr]*\})?(.*?)\\end\s*\{[a-z*]*\}", re.DOTALL
)
_SEMICOLON_ROWS = re.compile(r"\[([^\[\];,]*,[^\[\];]*(?:;[^\[\];]*)+)\]")
_RELATION = re.compile(r"\\(?:le|ge|ne|in|approx|simeq|equiv|sim)(?![a-zA-Z])|[=<>]")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
NAME = re.compile(
    r"(?:[mn]?\s*\\(?:angle|triangle)\s*)?\\?[A-Za-z]+(?:\s*\{[A-Za-z\s]*\})?'*(?:_(?:\w|\{[^{}]*\}))?'*"
    r"(?:\^\{?(?:-1|')\}?)?(?:\([A-Za-z0-9,\s\\]*\))?"
)
_NAMES = re.compile(rf"\\?[(\\{{]\s*{NAME.pattern}(?:\s*,\s*{NAME.pattern})+\s*\\?[)}}]")


@dataclasses.dataclass(frozen=True)
class Items:
    """Several values: `brackets` is "()", "[]", "[)", "(]", "{}", "<>", or "" for a bare list."""

    brackets: str
    items: list[str]


@dataclasses.dataclass(frozen=True)
class Relation:
    """`terms[0] signs[0] terms[1] ...`, for example `0 < x \\le 1`."""

    terms: list[str]
    signs: list[str]


def matrix(text: str) -> list[list[str]] | None:
    """The entries of a matrix, row by row."""
    whole = _MATRIX.fullmatch(text)
    if whole is not None:
        rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr(?![a-zA-Z])", whole[2].replace("\\hline", ""))]
        return [[entry.strip() for entry in row.split("&")] for row in rows if row.strip()]
    semicolons = _SEMICOLON_ROWS.fullmatch(text)
    if semicolons is not None:
        return [[entry.strip() for entry in row.split(",")] for row in semicolons[1].split(";")]
    nested = _NESTED_ROWS.fullmatch(text)
    if nested is not None:
        return [[entry.strip() for entry in row.split(",")] for row in re.findall(r"\[([^\[\]]*)\]", nested[1])]
    return None


def bracketed(text: str) -> Items | None:
    """The items in one pair of brackets that encloses the whole text; one item if there is no comma."""
    tokens = _TOKEN.findall(text)
    if len(tokens) < 2 or tokens[0] not in _ENDS or tokens[-1] not in _CLOSING:
        return None
    depth = 0
    for position, token in enumerate(tokens):
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0 and position < len(tokens) - 1:
            return None
    if depth != 0 or tokens[-1] not in _ENDS[tokens[0]]:
        return None
    inner = _without_thousands("".join(tokens[1:-1]).strip())
    brackets = {"\\{": "{}", "{": "{}", "\\langle": "<>"}.get(tokens[0], tokens[0] + tokens[-1])
    items = split(inner, ",;") if inner else []
    if tokens[0] == "{" and len(items) < 2:
        brackets = "()"  # a LaTeX group, not a set
    return Items(brackets, items)


def bare_list(text: str) -> Items | None:
    """Values without brackets, joined by commas, `and` or `or`."""
    cases = _CASES.fullmatch(text)
    if cases is not None:
        text = re.sub(r"\\\\(?:\[[^\]]*\])?", ",", cases[1]).replace("&", "")
    items = [item for item in split(_without_thousands(_JOINED.sub(",", text)), ",;") if item]
    return Items("", items) if len(items) > 1 else None


def _without_thousands(text: str) -> str:
    """The text without commas inside numbers, if the commas between values are followed by a space."""
    return _THOUSANDS.sub("", text) if ", " in text else text


def alternatives_as_union(text: str) -> str:
    """The text with `\\cup` for every `or`."""
    return _JOINED.sub(lambda match: " \\cup " if _says_or(match) else match[0], text)


def _says_or(match: re.Match[str]) -> bool:
    return "or" in match.groups()


def relation(text: str) -> Relation | None:
    """A chain of terms with at least one relation sign."""
    terms, signs, start = [], [], 0
    for position, token in _outside(text):
        if _RELATION.fullmatch(token):
            terms.append(text[start:position].strip())
            signs.append(token)
            start = position + len(token)
    if not signs:
        return None
    return Relation([*terms, text[start:].strip()], signs)


def is_name(text: str) -> bool:
    """Whether the text is a name that a value can be assigned to: `x`, `f(x)`, `\\angle ABC`, `(x, y)`, a word."""
    return bool(NAME.fullmatch(text) or _NAMES.fullmatch(text)) or bool(re.fullmatch(r"\\text\s*\{[^{}]*\}", text))


def split(text: str, separators: Sequence[str]) -> list[str]:
    """The parts between separators outside brackets."""
    parts, start = [], 0
    for position, token in _outside(text):
        if token in separators:
            parts.append(text[start:position].strip())
            start = position + len(token)
    return [*parts, text[start:].strip()]


def split_union(text: str) -> list[str]:
    """The parts between `\\cup` signs outside brackets."""
    return split(text, ("\\cup",))


def _outside(text: str) -> list[tuple[int, str]]:
    """Tokens outside brackets, with their positions."""
    found, depth, position = [], 0, 0
    for token in _TOKEN.findall(text):
        if token in _CLOSING:
            depth = max(0, depth - 1)
        elif token in _OPENING:
            depth += 1
        elif depth == 0:
            found.append((position, token))
        position += len(token)
    return found


_INFINITE = re.compile(r"[+-]?\s*\\infty")
_OPERATION = re.compile(r"\\(?:cup|cap|setminus)(?![a-zA-Z])")
_FRENCH = re.compile(r"([\[\]])([^\[\]]*),([^\[\]]*)([\[\]])")
_REALS = re.compile(r"\\mathbb\s*\{?R\}?|\\Reals|\\Re")
_SIDE = re.compile(r"\^\s*\{?\s*([+-])\s*\}?")
_EXCEPT = re.compile(
    r"(?:\\text\s*\{\s*)?all\s+real(?:s|\s+numbers)\s+except\s*\}?\s*(?:for\s+)?([^{}]+)\}?", re.IGNORECASE
)
_BUILDER = re.compile(r"\\?\{\s*(.+?)\s*(?:\||:)\s*(.+?)\s*\\?\}")
_MEMBER = re.compile(r"\s*(?:,|\\text\s*\{\s*(?:where|for)\s*\})?\s*[a-z]\s*\\in\s*\\mathbb\s*\{?R\}?\s*")
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_VARIABLE = re.compile(r"\\?[A-Za-z]+(?:_(?:\w|\{\w*\}))?(?:\([a-z]\))?")


@dataclasses.dataclass(frozen=True)
class Interval:
    """One interval of the real line; the ends are text."""

    low: str
    high: str
    low_closed: bool
    high_closed: bool


Same = Callable[[str, str], bool]


def union_of_intervals(text: str) -> list[Interval] | None:
    """The intervals in the text, in its order; None if it is not a set of real numbers."""
    builder = _BUILDER.fullmatch(text)
    if builder is not None:
        text = builder[2]
    text = _without_words(text)
    if "\\in" in text:
        text = _MEMBER.sub("", text) or text
    pieces: list[Interval] = []
    for part in split_union(alternatives_as_union(text)):
        piece = _brackets(part) or _reals(part) or _inequalities(part)
        if piece is None:
            return None
        pieces += piece
    return pieces


def is_set_of_reals(text: str) -> bool:
    """Whether the text is unambiguously a set of real numbers; `(1, 2)` is not, it may be a point."""
    text = _without_words(text)
    if _OPERATION.search(text) or _REALS.match(text) or _FRENCH.fullmatch(text) and text[0] == "]":
        return True
    items = bracketed(text)
    if items is not None and len(items.items) == 2:
        return items.brackets in ("[)", "(]") or any(_INFINITE.fullmatch(item) for item in items.items)
    signs = relation(text)
    return _BUILDER.fullmatch(text) is not None or (signs is not None and bool(set(signs.signs) & {*_FLIPPED, "\\ne"}))


def _without_words(text: str) -> str:
    """`all real numbers except 2` in symbols."""
    removed = _EXCEPT.fullmatch(text) if "except" in text else None
    return text if removed is None else f"\\mathbb{{R}}\\setminus\\{{{removed[1].replace(' and ', ', ')}\\}}"


def interval_text(intervals: list[Interval]) -> str:
    """The union in interval notation, as input for algebra."""
    return "\\cup ".join(
        f"{'[' if one.low_closed else '('}{one.low},{one.high}{']' if one.high_closed else ')'}" for one in intervals
    )


def equal_unions(first: list[Interval], second: list[Interval], same: Same) -> bool:
    """Whether two unions are the same set."""
    first, second = _merged(first), _merged(second)
    if len(first) != len(second):
        return False
    rest = list(second)
    for interval in first:
        match = next((other for other in rest if _equal_intervals(interval, other, same)), None)
        if match is None:
            return False
        rest.remove(match)
    return True


def _equal_intervals(first: Interval, second: Interval, same: Same) -> bool:
    return (
        first.low_closed == second.low_closed
        and first.high_closed == second.high_closed
        and same(first.low, second.low)
        and same(first.high, second.high)
    )


def _brackets(text: str) -> list[Interval] | None:
    match = _FRENCH.fullmatch(text)
    if match is not None:
        return [_interval(match[2], match[3], match[1] == "[", match[4] == "]")]
    items = bracketed(text)
    if items is None:
        return None
    if len(items.items) == 1 and items.brackets == "()":
        return union_of_intervals(items.items[0])
    if len(items.items) != 2 or items.brackets not in ("()", "[]", "[)", "(]"):
        return None
    low, high = items.items
    return [_interval(low, high, items.brackets[0] == "[", items.brackets[1] == "]")]


def _reals(text: str) -> list[Interval] | None:
    match = _REALS.match(text)
    if match is None:
        return None
    rest = text[match.end() :].strip()
    side = _SIDE.fullmatch(rest)
    if side is not None:
        return [_interval("0", "\\infty", False, False) if side[1] == "+" else _interval("-\\infty", "0", False, False)]
    if not rest:
        return _all_but([])
    removed = re.fullmatch(r"(?:\\setminus|\\backslash|-)\s*(.+)", rest)
    items = bracketed(removed[1]) if removed is not None else None
    return None if items is None or items.brackets != "{}" and len(items.items) != 1 else _all_but(items.items)


def _inequalities(text: str) -> list[Interval] | None:
    parts = bare_list(text)
    if parts is None:
        return _inequality(text)
    items = parts.items
    if "\\ne" in items[0] and all(relation(item) is None for item in items[1:]):  # `x \\ne 2, 3`
        name = items[0].split("\\ne")[0]
        items = [items[0], *(f"{name}\\ne {item}" for item in items[1:])]
    excluded = [part.split("\\ne")[1].strip() for part in items if "\\ne" in part]
    found = [_inequality(part) for part in items if "\\ne" not in part]
    pieces = [piece[0] for piece in found if piece is not None and len(piece) == 1]
    if len(pieces) < len(found):
        return None
    if not pieces:
        return _all_but(excluded)
    whole = pieces if len(pieces) == 1 else _overlap(pieces)
    return whole if whole is None or not excluded else _without(whole, excluded)


def _inequality(text: str) -> list[Interval] | None:
    chain = relation(text)
    if chain is None:
        return None
    terms, signs = chain.terms, chain.signs
    if signs == ["\\ne"] and _VARIABLE.fullmatch(terms[0]):
        return _all_but([terms[1]])
    if signs == ["\\in"] and _VARIABLE.fullmatch(terms[0]):
        return union_of_intervals(terms[1])
    if not all(sign in _FLIPPED for sign in signs):
        return None
    if len(signs) == 2 and _VARIABLE.fullmatch(terms[1]):
        if signs[0] in (">", "\\ge"):
            terms, signs = terms[::-1], [_FLIPPED[sign] for sign in signs[::-1]]
        if signs[1] not in ("<", "\\le") or signs[0] not in ("<", "\\le"):
            return None
        return [_interval(terms[0], terms[2], signs[0] == "\\le", signs[1] == "\\le")]
    if len(signs) != 1:
        return None
    (sign,), (left, right) = signs, terms
    if _VARIABLE.fullmatch(right) and not _VARIABLE.fullmatch(left):
        left, right, sign = right, left, _FLIPPED[sign]
    if not _VARIABLE.fullmatch(left):
        return None
    closed = sign in ("\\le", "\\ge")
    if sign in ("<", "\\le"):
        return [_interval("-\\infty", right, False, closed)]
    return [_interval(right, "\\infty", closed, False)]


def _interval(low: str, high: str, low_closed: bool, high_closed: bool) -> Interval:
    low, high = low.strip(), high.strip()
    return Interval(
        low, high, low_closed and not _INFINITE.fullmatch(low), high_closed and not _INFINITE.fullmatch(high)
    )


def _all_but(points: list[str]) -> list[Interval] | None:
    values = [rational(point) for point in points]
    if len(points) > 1:
        if any(value is None for value in values):
            return None
        points = [point for _, point in sorted(zip(values, points, strict=True))]
    ends = ["-\\infty", *points, "\\infty"]
    return [_interval(low, high, False, False) for low, high in zip(ends, ends[1:], strict=False)]


def _without(intervals: list[Interval], points: list[str]) -> list[Interval] | None:
    """One interval minus points inside it; None unless all of them are known numbers."""
    (whole,) = intervals
    low, high = _end(whole.low), _end(whole.high)
    values = sorted({value for point in points if (value := rational(point)) is not None})
    if low is None or high is None or not values or not all(low < value < high for value in values):
        return None
    ends = [whole.low, *(str(value) for value in values), whole.high]
    pieces = [_interval(one, other, False, False) for one, other in zip(ends, ends[1:], strict=False)]
    pieces[0] = dataclasses.replace(pieces[0], low_closed=whole.low_closed)
    pieces[-1] = dataclasses.replace(pieces[-1], high_closed=whole.high_closed)
    return pieces


def _overlap(intervals: list[Interval]) -> list[Interval] | None:
    """The intersection of two overlapping half-lines, such as x > 1 and x < 3."""
    if len(intervals) != 2:
        return None
    below = [interval for interval in intervals if _INFINITE.fullmatch(interval.low)]
    above = [interval for interval in intervals if _INFINITE.fullmatch(interval.high)]
    if len(below) != 1 or len(above) != 1:
        return None
    return [_interval(above[0].low, below[0].high, above[0].low_closed, below[0].high_closed)]


def _merged(intervals: list[Interval]) -> list[Interval]:
    """Merges intervals that touch or overlap, if all their ends are known numbers."""
    ends = [(_end(interval.low), _end(interval.high), interval) for interval in intervals]
    known = [(low, high, interval) for low, high, interval in ends if low is not None and high is not None]
    if len(intervals) < 2 or len(known) < len(intervals):
        return intervals
    known.sort(key=lambda entry: (entry[0], not entry[2].low_closed))
    merged = [known[0]]
    for low, high, interval in known[1:]:
        last_low, last_high, last = merged[-1]
        if low > last_high or (low == last_high and not (interval.low_closed or last.high_closed)):
            merged.append((low, high, interval))
        elif (high, interval.high_closed) > (last_high, last.high_closed):
            joined = Interval(last.low, interval.high, last.low_closed, interval.high_closed)
            merged[-1] = (last_low, high, joined)
    return [interval for _, _, interval in merged]


def _end(text: str) -> Fraction | float | None:
    if _INFINITE.fullmatch(text):
        return float("-inf") if text.startswith("-") else float("inf")
    return rational(text)
