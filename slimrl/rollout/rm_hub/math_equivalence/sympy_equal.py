"""Equality of expressions and relations by computer algebra: math-verify parses the LaTeX, SymPy computes.

The size of an expression is checked before its evaluation, but an integral or a limit may still hang or fill the
memory: this runs in a grader process, under its limits.
"""

from __future__ import annotations

import logging
import math
import random
import re
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

DIGITS = 40
MAX_EXPONENT = 10_000
MAX_FACTORIAL = 3_000
MAX_NODES = 3_000
MAX_CHARS = 800  # the parser takes a second for some texts of twice the length

_POINTS = 8
_TOLERANCE = sympy.Float(10) ** (-DIGITS // 2)
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\\circ")
_ROMAN = re.compile(r"\\(?:text|mathrm|operatorname)\s*\{\s*([a-zA-Z]+)\s*\}")
_FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "exp", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh",
    "gcd", "max", "min", "det",
}  # fmt: skip
_COMMAND_OR_LETTER = re.compile(r"\\(?:begin|end)\{[a-zA-Z]*\}|\\[a-zA-Z]+|[a-zA-Z](?!_)")
_CONJUGATE = re.compile(r"\\(?:overline|bar)\s*\{([^{}]*(?<![a-zA-Z])i(?![a-zA-Z])[^{}]*)\}")
_UNIT = re.compile(r"(?<![a-zA-Z\\])i(?![a-zA-Z])")
_LINEAR = re.compile(r"(?<![\d.}])(\d+)/(\d+)(?=[a-zA-Z\\])")
# units are split off earlier, and the library would treat the `h` of `\\pi r^2 h` as one
_NORMALIZATION = NormalizationConfig(units=False, malformed_operators=True, nits=True)
_WHOLE = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=_NORMALIZATION)]
_CONSTANTS = {"i": sympy.I, "e": sympy.E}


# functions whose number of steps grows with their arguments
_COUNTED = (sympy.binomial, sympy.gamma, sympy.Product, sympy.fibonacci, sympy.harmonic)


class TooLarge(Exception):
    """An expression whose evaluation would take too many digits or steps."""


def warm_up() -> None:
    """Parses one expression, so that the parser's tables are built before a time limit runs."""
    for library in ("math_verify", "latex2sympy2_extended"):  # they log every answer that they cannot parse
        logging.getLogger(library).setLevel(logging.CRITICAL)
    equal("\\frac{x+1}{2}", "\\sqrt{2}")


def equal(answer: str, label: str) -> bool:
    """Whether two expressions are equal for all values of their variables, or two relations are equivalent.

    Text that cannot be parsed is unequal. Raises TooLarge, and any exception of SymPy on adversarial text.
    """
    if max(len(answer), len(label)) > MAX_CHARS:
        raise TooLarge(f"an expression has more than {MAX_CHARS} characters")
    first, second = map(_read, _distinguish_case(answer, label))
    if first is None or second is None:
        return False
    if isinstance(first, sympy.Expr) and isinstance(second, sympy.Expr) and not _is_matrix(first, second):
        return _same_value(first, second)
    if isinstance(first, sympy.Eq) and isinstance(second, sympy.Eq) and _proportional(first, second):
        return True
    sets = _as_set(first), _as_set(second)
    if None not in sets and sets[0] == sets[1]:
        return True
    try:
        return bool(verify(second, first, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp=True))
    except (TypeError, ValueError, KeyError, AttributeError):
        if _kind(first) == _kind(second):
            raise
        return False  # different kinds, such as a point and a line: they cannot be subtracted


def _distinguish_case(answer: str, label: str) -> tuple[str, str]:
    """Renames capital letters that also occur in lower case, because the parser ignores case."""
    letters = set(_COMMAND_OR_LETTER.findall(answer + " " + label))
    clash = {letter for letter in letters if letter.isupper() and letter.lower() in letters}
    if not clash:
        return answer, label

    def renamed(match: re.Match[str]) -> str:
        return f"{match[0]}_{{0}}" if match[0] in clash else match[0]

    return _COMMAND_OR_LETTER.sub(renamed, answer), _COMMAND_OR_LETTER.sub(renamed, label)


def _read(text: str) -> Any:
    found = parse(f"\\boxed{{{_prepared(text)}}}", _WHOLE, parsing_timeout=None, raise_on_error=True)
    if not found or isinstance(found[0], str):
        return None
    expression = found[0]
    if isinstance(expression, sympy.Basic):
        if expression.has(sympy.zoo, sympy.nan):
            return None
        _check_size(expression)
    return _plain(expression)


def _prepared(text: str) -> str:
    """The text with decimals as fractions, degrees as radians and functions as LaTeX commands."""
    text = _ROMAN.sub(lambda match: f"\\{match[1]} " if match[1] in _FUNCTIONS else match[1], text)
    text = _CONJUGATE.sub(lambda match: "(" + _UNIT.sub("(-i)", match[1]) + ")", text)
    text = _LINEAR.sub(r"\\frac{\1}{\2}", text)
    text = _DEGREES.sub(r"{\\frac{\1\\pi}{180}}", text)
    return _DECIMAL.sub(lambda match: f"\\frac{{{int(match[1] + match[2])}}}{{{10 ** len(match[2])}}}", text)


def _check_size(expression: sympy.Basic) -> None:
    for count, node in enumerate(sympy.preorder_traversal(expression)):
        if count > MAX_NODES:
            raise TooLarge(f"the answer has more than {MAX_NODES} parts")
        if isinstance(node, sympy.Pow) and _log10(node.exp) > math.log10(MAX_EXPONENT):
            raise TooLarge(f"the answer has an exponent above {MAX_EXPONENT}")
        if isinstance(node, sympy.factorial | sympy.factorial2) and _log10(node.args[0]) > math.log10(MAX_FACTORIAL):
            raise TooLarge(f"the answer has a factorial above {MAX_FACTORIAL}!")
        if isinstance(node, _COUNTED) and any(_log10(part) > math.log10(MAX_EXPONENT) for part in node.args):
            raise TooLarge(f"the answer has {type(node).__name__} of a number above {MAX_EXPONENT}")


def _log10(expression: sympy.Basic) -> float:
    """An upper bound of log10 of a constant; variables count as 1."""
    if expression.is_Integer or expression.is_Rational:
        return float(sympy.log(abs(expression) + 1, 10))
    parts = [_log10(part) for part in expression.args]
    if isinstance(expression, sympy.Pow):
        return math.inf if parts[1] > 3 else max(0.0, parts[0]) * 10 ** parts[1]
    if isinstance(expression, sympy.factorial):
        return math.inf if parts[0] > 3 else 10 ** parts[0] * max(parts[0], 1)
    if isinstance(expression, sympy.Mul):
        return sum(parts)
    return max(parts, default=0.0) + (1 if len(parts) > 1 else 0)


def _plain(expression: Any) -> Any:
    """One symbol per letter, e and i as numbers, odd roots of negative numbers as real roots."""
    if not isinstance(expression, sympy.Basic):
        return expression
    letters = {
        letter: _CONSTANTS.get(letter.name, sympy.Symbol(letter.name, real=True)) for letter in _letters(expression)
    }
    return expression.xreplace(letters).replace(_is_odd_root, _real_root)


def _letters(expression: sympy.Basic) -> set[sympy.Symbol]:
    return expression.atoms(sympy.Symbol)


def _is_odd_root(node: sympy.Basic) -> bool:
    return (
        isinstance(node, sympy.Pow)
        and node.exp.is_Rational
        and node.exp.q % 2 == 1
        and node.exp.q > 1
        and bool(node.base.is_negative)
    )


def _real_root(node: sympy.Pow) -> sympy.Expr:
    return (-1) ** node.exp.p * (-node.base) ** node.exp


def _is_matrix(*expressions: sympy.Expr) -> bool:
    return any(getattr(expression, "is_Matrix", False) for expression in expressions)


def _same_value(first: sympy.Expr, second: sympy.Expr) -> bool:
    if first == second:
        return True
    first, second = first.doit(), second.doit()
    if first.is_Rational and second.is_Rational:
        return first == second
    return _agree(first, second)


def _agree(first: sympy.Expr, second: sympy.Expr) -> bool:
    """Whether two expressions agree to `DIGITS / 2` digits at all points where both are real (or at all, if none)."""
    letters = sorted(first.free_symbols | second.free_symbols, key=str)
    real: list[bool] = []
    others: list[bool] = []
    for point in _points(letters):
        values = [sympy.N(part.subs(point), DIGITS, maxn=4 * DIGITS) for part in (first, second)]
        if all(value.is_number and value.is_finite for value in values):
            close = bool(abs(values[0] - values[1]) <= _TOLERANCE * (1 + abs(values[1])))
            (real if all(value.is_real for value in values) else others).append(close)
    seen = real or others
    return bool(seen) and all(seen)


def _kind(value: Any) -> type | None:
    kinds = (sympy.core.relational.Relational, sympy.Set, sympy.Tuple, sympy.MatrixBase, sympy.Expr)
    return next((kind for kind in kinds if isinstance(value, kind)), None)


def _as_set(value: Any) -> sympy.Set | None:
    """A set, or the solution set of inequalities in one real variable."""
    if isinstance(value, sympy.Set):
        return value.doit()
    if not isinstance(value, sympy.Basic) or len(value.free_symbols) != 1:
        return None
    parts = value.args if value.func.__name__ == "And" else (value,)
    if not all(isinstance(part, sympy.core.relational.Relational) for part in parts):
        return None
    (letter,) = value.free_symbols
    try:
        sets = [sympy.solve_univariate_inequality(part, letter, relational=False) for part in parts]
    except NotImplementedError:  # an inequality that SymPy cannot solve
        return None
    return sympy.Intersection(*sets).doit()


def _points(letters: list[sympy.Symbol]) -> list[dict[sympy.Symbol, sympy.Rational]]:
    """Points for comparison, always the same; half of them have only positive coordinates."""
    generator = random.Random(0)
    low = [-4000 if number % 2 else 1 for number in range(_POINTS)]
    count = _POINTS if letters else 1
    return [
        {letter: sympy.Rational(generator.randint(least, 4000), 997) for letter in letters} for least in low[:count]
    ]


def _proportional(first: sympy.Eq, second: sympy.Eq) -> bool:
    """Whether the differences of the two equations' sides are constant multiples of each other."""
    one, other = ((relation.lhs - relation.rhs).doit() for relation in (first, second))
    if one.free_symbols != other.free_symbols or not one.free_symbols:
        return False
    point = _points(sorted(one.free_symbols, key=str))[0]
    at_one, at_other = one.subs(point), other.subs(point)
    return bool(at_one != 0) and bool(at_other != 0) and _agree(one * at_other, other * at_one)
