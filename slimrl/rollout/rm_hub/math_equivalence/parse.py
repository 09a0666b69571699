"""Parses the structure of an answer: lists, sets, tuples, matrices, relations; their elements stay text.

The input is the output of `normalize.clean`. Every function takes linear time and returns None if the text does not
have the structure.
"""

from __future__ import annotations

import dataclasses
import re

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


def is_alternative(text: str) -> bool:
    """Whether the parts of a bare list are joined by `or`."""
    return any(map(_says_or, _JOINED.finditer(text)))


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


def split(text: str, separators: str) -> list[str]:
    """The parts between separators outside brackets."""
    parts, start = [], 0
    for position, token in _outside(text):
        if token in separators:
            parts.append(text[start:position].strip())
            start = position + 1
    return [*parts, text[start:].strip()]


def union_of_sets(text: str) -> Items | None:
    """The elements of finite sets joined by `\\cup`."""
    parts = [bracketed(part) for part in split_union(text)]
    sets = [part for part in parts if part is not None and part.brackets == "{}"]
    if len(parts) < 2 or len(sets) < len(parts):
        return None
    return Items("{}", [item for part in sets for item in part.items])


def point(text: str) -> Items | None:
    """The coordinates of a named point, `P(3, 4)`."""
    named = re.fullmatch(r"[A-Z]\s*(\(.*\))", text)
    items = None if named is None else bracketed(named[1])
    return items if items is not None and len(items.items) > 1 else None


def split_union(text: str) -> list[str]:
    """The parts between `\\cup` signs outside brackets."""
    parts, start = [], 0
    for position, token in _outside(text):
        if token == "\\cup":
            parts.append(text[start:position].strip())
            start = position + len(token)
    return [*parts, text[start:].strip()]


def both_signs(text: str) -> list[str]:
    """The two values of an answer with `\\pm`; otherwise the answer itself."""
    if "\\pm" not in text and "\\mp" not in text:
        return [text]
    upper = re.sub(r"\\pm(?![a-zA-Z])", "+", re.sub(r"\\mp(?![a-zA-Z])", "-", text))
    lower = re.sub(r"\\pm(?![a-zA-Z])", "-", re.sub(r"\\mp(?![a-zA-Z])", "+", text))
    return [upper, lower]


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
