"""Decides whether two answers are equivalent: by spelling, exact numbers, structure, then computer algebra.

Called in a grader process. Algebra is used only for single values and relations that no cheaper check decides.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from fractions import Fraction

from slimrl.rollout.rm_hub.math_equivalence import equality_chains, normalize, parse
from slimrl.rollout.rm_hub.math_equivalence.normalize import clean, tight
from slimrl.rollout.rm_hub.math_equivalence.parse import Items, bracketed, split_union
from slimrl.rollout.rm_hub.math_equivalence.quantities import at_once, conversion, measure, rational, split_unit

MAX_CHARS = 2000
MAX_DEPTH = 12
MAX_ITEMS = 200

_TRIGONOMETRIC = re.compile(r"sin|cos|tan|cot|sec|csc|\\pi")
_GROUPED = re.compile(r",(?=\d{3})")
_BASED = re.compile(r"(-?[0-9A-F]+)_\{?(\d+)\}?")
_HEXADECIMAL = re.compile(r"(-?)0[xX]([0-9A-Fa-f]+)")
_SPOKEN_RATIO = re.compile(r"(?<=[\d}])\s*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*(?=[\d\\])")

Algebra = Callable[[str, str], bool]


def answers_equal(answer: str, label: str, algebra: Algebra) -> bool:
    """Whether `answer` is equivalent to `label`.

    `algebra(answer, label)` compares LaTeX expressions and relations; its exceptions pass through. Answers longer than
    `MAX_CHARS` characters, or nested deeper than `MAX_DEPTH`, are equal only if their spelling is.
    """
    if answer.strip() == label.strip():
        return bool(answer.strip())
    if len(answer) > MAX_CHARS or len(label) > MAX_CHARS:
        return False
    values = at_once(answer), at_once(label)
    if None not in values:
        return values[0] == values[1]
    answer, label = clean(answer), clean(label)
    if not answer or not label:
        return False
    return _Comparison(algebra).equal(answer, label)


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """Compares outputs of `clean`; `depth` is the nesting depth of the texts in brackets."""

    algebra: Algebra
    depth: int = 0

    def equal(self, answer: str, label: str) -> bool:
        if tight(answer) == tight(label):
            return True
        if "\\text" in answer + label and normalize.plain(answer) == normalize.plain(label):
            return True
        if self.depth > MAX_DEPTH or not answer or not label:
            return False
        values = rational(answer), rational(label)
        if None not in values:
            return values[0] == values[1]
        if (":" in answer) != (":" in label) and "to" in answer + label:
            answer, label = (_SPOKEN_RATIO.sub(":", text) for text in (answer, label))
            if tight(answer) == tight(label):
                return True
        plain = [
            _GROUPED.sub("", text) if value is not None else text
            for text, value in zip((answer, label), values, strict=True)
        ]
        if plain != [answer, label] and self._deeper().equal(*plain):
            return True  # `1,024` is a number, but may also be a list
        for decide in (
            self._numbers,
            self._other_bases,
            self._matrices,
            self._choices,
            self._words,
            self._sets_of_reals,
            self._assignments,
            self._lists,
            self._values,
        ):
            result = decide(answer, label)
            if result is not None:
                return result
        return self._without_degrees(answer, label) or self.algebra(answer, label)

    def _without_degrees(self, answer: str, label: str) -> bool:
        """Whether the two are equal if one of them is in degrees: `180 - x` and `180^\\circ - x`."""
        signs = "^\\circ" in answer, "^\\circ" in label
        if signs[0] == signs[1] or _TRIGONOMETRIC.search(answer + label):
            return False
        return self._deeper().equal(answer.replace("^\\circ", ""), label.replace("^\\circ", ""))

    def _deeper(self) -> _Comparison:
        return dataclasses.replace(self, depth=self.depth + 1)

    def _numbers(self, answer: str, label: str) -> bool | None:
        """Numbers with units or a currency."""
        parts = split_unit(answer), split_unit(label)
        if any(rational(value) is None for value, _ in parts):
            return None
        return self._values(answer, label)

    def _other_bases(self, answer: str, label: str) -> bool | None:
        """Numbers with a base, `1010_2`: equal to the same digits in this base or without one, and to the decimal."""
        prefixed = [_HEXADECIMAL.fullmatch(text) for text in (answer, label)]
        if any(prefixed):
            return self._prefixed(prefixed, answer, label)
        first, second = _BASED.fullmatch(answer), _BASED.fullmatch(label)
        if first is not None and second is not None:
            return first.groups() == second.groups()
        based, plain = (first, label) if first is not None else (second, answer)
        if based is None or not plain.isdecimal() or not 2 <= int(based[2][:3]) <= 36:
            return None
        return based[1] == plain or _in_decimals(based[1], int(based[2][:3])) == int(plain)

    def _prefixed(self, prefixed: list[re.Match[str] | None], answer: str, label: str) -> bool:
        """`0x10` as the number 16, or as digits in base 16 if the other has a base; never as the digits 10."""
        texts = [answer, label]
        based = any(map(_BASED.fullmatch, texts))
        for index, match in enumerate(prefixed):
            if match is not None:
                digits = f"{match[2].lstrip('0').upper() or 0}_16" if based else str(int(match[2], 16))
                texts[index] = match[1] + digits
        return self._deeper().equal(*texts)

    def _matrices(self, answer: str, label: str) -> bool | None:
        first, second = parse.matrix(answer), parse.matrix(label)
        if first is None:
            return None if second is None else self._vector(second, answer)
        if second is None:
            return self._vector(first, label)
        if [len(row) for row in first] != [len(row) for row in second]:
            return False
        inner = self._deeper()
        pairs = zip(sum(first, []), sum(second, []), strict=True)
        return all(inner.equal(one, other) for one, other in pairs)

    def _vector(self, rows: list[list[str]], other: str) -> bool | None:
        """Compares a matrix of one column or row with a tuple; None if the other is not a tuple."""
        entries = sum(rows, [])
        items = parse.bracketed(other)
        if items is None or items.brackets == "{}" or len(items.items) != len(entries):
            return None if items is None or len(items.items) == 1 else False
        if len(rows) > 1 and len(rows[0]) > 1:
            return False
        return self._ordered(entries, items.items)

    def _choices(self, answer: str, label: str) -> bool | None:
        first, second = normalize.choice(answer), normalize.choice(label)
        if first is not None and second is not None:
            return first[0] == second[0]
        if first is not None and first[1]:
            return self._deeper().equal(first[1], label) or None
        if second is not None and second[1]:
            return self._deeper().equal(answer, second[1]) or None
        return None

    def _words(self, answer: str, label: str) -> bool | None:
        first, second = normalize.as_words(answer), normalize.as_words(label)
        if first is None and second is None:
            return None
        if first is not None and second is not None:
            if first == second or normalize.with_digits(first) == normalize.with_digits(second):
                return True
            lists = [found for text in (answer, label) if (found := parse.bare_list(text)) is not None]
            if len(lists) == 2 and all(normalize.as_words(item) for part in lists for item in part.items):
                return self._unordered(lists[0].items, lists[1].items)
            with_units = split_unit(answer), split_unit(label)
            if all(rational(value) is not None for value, _ in with_units):
                return None
            return False
        words, other = (first, label) if first is not None else (second, answer)
        assert words is not None  # exactly one of the two is None
        value = normalize.number_word(words)
        if value is not None:
            return value == rational(split_unit(other)[0])
        if words == "infinitely many":
            return tight(other) == "\\infty" or None
        if words == "no solution":
            return tight(other) == "\\emptyset" or None
        if words == "all real numbers":
            return tight(other) in ("\\mathbb{R}", "(-\\infty,\\infty)", "(-\\infty,+\\infty)") or None
        return None

    def _sets_of_reals(self, answer: str, label: str) -> bool | None:
        if not (parse.is_set_of_reals(answer) or parse.is_set_of_reals(label)):
            return None
        first, second = parse.union_of_intervals(answer), parse.union_of_intervals(label)
        if first is None and second is None:
            return None
        if first is None or second is None:
            if not _is_set_or_relation(answer, label):
                return False
            known = [
                text if part is None else parse.interval_text(part) for text, part in ((answer, first), (label, second))
            ]
            return self.algebra(answer, label) or (known != [answer, label] and self.algebra(*known))
        return parse.equal_unions(first, second, self._deeper().equal)

    def _assignments(self, answer: str, label: str) -> bool | None:
        equal = self._assigned_values(answer, label)
        return equality_chains.holds(answer) if equal else equal

    def _assigned_values(self, answer: str, label: str) -> bool | None:
        first, second = _assigned(answer), _assigned(label)
        if second is not None and not parse.is_name(second[0]):
            return None  # a label that is an equation requires an equation
        if first is None and second is None:
            return None
        if first is not None and second is not None:
            if not (parse.is_name(first[0]) and parse.is_name(second[0])):
                return self.algebra(answer, label)
            if tight(first[0]) != tight(second[0]):
                return self.algebra(answer, label) if _has_letters(first[1]) or _has_letters(second[1]) else False
            return self._deeper().equal(first[1], second[1])
        assigned, other = (first, label) if first is not None else (second, answer)
        assert assigned is not None  # exactly one of the two is None
        value = assigned[1]
        if parse.relation(other) is not None and parse.bare_list(other) is None:
            return None
        pair = (value, other) if first is not None else (other, value)
        return self._deeper().equal(*pair)

    def _lists(self, answer: str, label: str) -> bool | None:
        first, second = _items(answer), _items(label)
        if first is None:
            if second is None:
                return None
            return _equals_its_item(second) and self._deeper().equal(answer, second.items[0])
        if second is None:
            return _equals_its_item(first) and self._deeper().equal(first.items[0], label)
        if (len(first.items) == 1) != (len(second.items) == 1):
            pair = (first.items[0], label) if len(first.items) == 1 else (answer, second.items[0])
            return self._deeper().equal(*pair)
        if max(len(first.items), len(second.items)) > MAX_ITEMS:
            return False
        kinds = {first.brackets, second.brackets}
        if kinds <= {"{}"}:
            return self._unordered(first.items, second.items, repeated=True)
        if "{}" in kinds:
            return "" in kinds and self._unordered(first.items, second.items)
        if kinds == {""}:
            return self._unordered(first.items, second.items)
        if len(kinds) == 2 and "" not in kinds and len(first.items) == 2 and kinds != {"()", "<>"}:
            return False  # a point is not an interval, and (0, 1] is not [0, 1)
        return self._ordered(first.items, second.items)

    def _values(self, answer: str, label: str) -> bool | None:
        (value, unit), (other, other_unit) = split_unit(answer), split_unit(label)
        if unit is None and other_unit is None:
            return None
        same = self._deeper().equal
        if unit is not None and other_unit is not None:
            factor = conversion(unit, other_unit)
            if factor is None:
                return self._as_letters(answer, label)
            return same(value, other) if factor == 1 else self._scaled(value, factor, other)
        if unit is not None:
            return self._one_unit(value, unit, other) or self._as_letters(answer, label)
        assert other_unit is not None  # at least one of the two is not None
        return self._one_unit(other, other_unit, value) or self._as_letters(answer, label)

    def _one_unit(self, value: str, unit: str, bare: str) -> bool:
        """Compares a value with a unit to one without: the unit may be implied, or converted into the number."""
        kind, size = measure(unit)
        if self._deeper().equal(value, bare):
            return True
        if kind == "share":
            return self._scaled(value, Fraction(1, 100), bare)
        if kind == "angle" and "\\pi" in bare:
            return self.algebra(f"({value})\\cdot\\frac{{\\pi}}{{180}}", bare)
        return False

    def _as_letters(self, answer: str, label: str) -> bool:
        """Compares with apparent units as variables: `5 m` and `5m`, `2 x h` and `2hx`."""
        return "\\text" not in answer + label and self.algebra(answer, label)

    def _scaled(self, value: str, factor: Fraction, other: str) -> bool:
        known, expected = rational(value), rational(other)
        if known is not None and expected is not None:
            return known * factor == expected
        return self.algebra(f"({value})\\cdot\\frac{{{factor.numerator}}}{{{factor.denominator}}}", other)

    def _ordered(self, first: list[str], second: list[str]) -> bool:
        inner = self._deeper()
        return len(first) == len(second) and all(inner.equal(*pair) for pair in zip(first, second, strict=True))

    def _unordered(self, first: list[str], second: list[str], *, repeated: bool = False) -> bool:
        """Whether the two have the same values; with `repeated` the number of repetitions may differ."""
        inner = self._deeper()
        if not repeated and len(first) != len(second):
            return False
        if repeated:
            return all(any(inner.equal(one, other) for other in second) for one in first) and all(
                any(inner.equal(one, other) for one in first) for other in second
            )
        rest = list(second)
        for item in first:
            match = next((other for other in rest if inner.equal(item, other)), None)
            if match is None:
                return False
            rest.remove(match)
        return True


def _in_decimals(digits: str, base: int) -> int | None:
    try:
        return int(digits, base)
    except ValueError:  # a digit that the base does not have
        return None


def _assigned(text: str) -> tuple[str, str] | None:
    """Name and value of `name = value`; of a chain of equalities, the last value; of `name \\in set`, the set."""
    chain = parse.relation(text)
    if chain is None or parse.bare_list(text) is not None:
        return None
    named = parse.is_name(chain.terms[0])
    if named and chain.signs == ["\\in"]:
        return chain.terms[0], chain.terms[-1]
    # an equation that ends in 0 assigns no value, unless its left side is a name
    equalities = all(sign in ("=", "\\approx", "\\simeq", "\\equiv") for sign in chain.signs)
    if not equalities or (not named and chain.terms[-1] == "0"):
        return None
    # terms before the first rounding sign are exact
    exact = next((index for index, sign in enumerate(chain.signs) if sign != "="), len(chain.signs))
    if not named and chain.signs == ["="] and parse.is_name(chain.terms[1]) and rational(chain.terms[0]) is not None:
        return chain.terms[1], chain.terms[0]
    return chain.terms[0], chain.terms[exact] if exact or not (named or not chain.terms[0]) else chain.terms[-1]


def _has_letters(text: str) -> bool:
    """Whether a value has letters outside LaTeX commands, so that it may depend on a variable."""
    return re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text)) is not None


def _equals_its_item(items: parse.Items) -> bool:
    """Whether brackets around a single item may be omitted; not those around the empty set."""
    return len(items.items) == 1 and not (items.brackets == "{}" and tight(items.items[0]) == "\\emptyset")


def _is_set_or_relation(answer: str, label: str) -> bool:
    """Whether algebra may interpret both texts as sets of numbers: an intersection, `x^2 < 4`."""
    return all(
        parse.relation(text) or parse.bracketed(text) or re.search(r"\\c[au]p|\\setminus", text)
        for text in (answer, label)
    )


def _items(text: str) -> parse.Items | None:
    """The values of a list, set or tuple, with both values of every `\\pm`; None for a single value."""
    items = parse.bare_list(text)
    if items is None:
        items = parse.bracketed(text) or union_of_sets(text) or point(text)
        if items is not None and items.brackets == "[]" and len(items.items) == 1:
            items = parse.Items("()", items.items)
    if items is None and ("\\pm" in text or "\\mp" in text):
        items = parse.Items("", [text])
    if items is None or items.brackets not in ("", "{}"):
        return items
    return parse.Items(items.brackets, [value for item in items.items for value in both_signs(item)])


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


def both_signs(text: str) -> list[str]:
    """The two values of an answer with `\\pm`; otherwise the answer itself."""
    if "\\pm" not in text and "\\mp" not in text:
        return [text]
    upper = re.sub(r"\\pm(?![a-zA-Z])", "+", re.sub(r"\\mp(?![a-zA-Z])", "-", text))
    lower = re.sub(r"\\pm(?![a-zA-Z])", "-", re.sub(r"\\mp(?![a-zA-Z])", "+", text))
    return [upper, lower]
