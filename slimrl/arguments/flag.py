"""`FlagSpec`, the declaration of one flag as a typed dataclass field, and `Problem`, one error of a command line.

A flag's spelling, type, default, help and choices are declared once, in its field under `flags/`. The parser, the
documentation and the tests use the `FlagSpec`s read here.
`layer_pattern` parses a selection of layers: `2` (every second) or an expression like `[0]*3+[1]*45` (one 0 or 1 per
layer). The expression is parsed, not evaluated: lists of integers, repeated by `*` and joined by `+`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Problem:
    """`flag` is the flag at fault, `sentence` has its value, the rule and the fix."""

    flag: str
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def ended(text: str) -> str:
    """`text` with a full stop, unless it ends with a question."""
    return text if text.endswith("?") else text + "."


def report(problems: Sequence[Problem], entry: str) -> str:
    """Every problem, numbered, as text for a terminal."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"{entry}: {count} with the command line; nothing was started."]
    lines += [f"  {number}. {problem.sentence}" for number, problem in enumerate(problems, start=1)]
    return "\n".join(lines)


_METADATA_KEY = "flag"


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The range of a number, without the value `other_than`; None means no bound."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    other_than: float | None = None

    def check(self, value: Any) -> None:
        """Raises ValueError whose text completes the sentence "<flag> <value> ..."."""
        if self.at_least is not None and value < self.at_least:
            raise ValueError(f"is too small: it must be at least {self.at_least:.10g}")
        if self.above is not None and value <= self.above:
            raise ValueError(f"is too small: it must be above {self.above:.10g}")
        if self.at_most is not None and value > self.at_most:
            raise ValueError(f"is too large: it must be at most {self.at_most:.10g}")
        if self.below is not None and value >= self.below:
            raise ValueError(f"is too large: it must be below {self.below:.10g}")
        if self.other_than is not None and value == self.other_than:
            raise ValueError("is not allowed: give another number, or leave it out")


@dataclasses.dataclass(frozen=True)
class FlagSpec:
    """The declaration of one flag.

    A switch (`value_type` bool) takes no value: a spelling in `on` sets True, one in `off` sets False.
    Any other flag takes one value, or at least `least` values if `many` is true.
    """

    dest: str
    group: str
    value_type: type
    many: bool
    least: int
    default: Any
    help: str
    choices: tuple[Any, ...] | None
    bounds: Bounds
    on: tuple[str, ...]
    off: tuple[str, ...]
    parse: Callable[[str], Any] | None
    not_served: str | None
    served: tuple[Any, ...]
    hints: dict[str, str]

    @property
    def is_switch(self) -> bool:
        """True if the flag takes no value."""
        return self.value_type is bool

    @property
    def name(self) -> str:
        """The spelling that messages use."""
        return (self.on or self.off)[0]

    def convert(self, text: str) -> Any:
        """`text` as a value of this flag. Raises ValueError whose text completes the sentence "<flag> <text> ..."."""
        if text == "" and self.default != "":
            raise ValueError("is empty, perhaps because of an unset variable: give a value, or leave it out")
        value = (self.parse or _CONVERTERS[self.value_type])(text)
        self.check(value)
        return value

    def refuses(self, value: Any) -> bool:
        """True if `value` is valid but unsupported; `not_served` then names the alternative."""
        return self.not_served is not None and value != self.default and value not in self.served

    def check(self, value: Any) -> None:
        """Raises ValueError, worded as in `convert`, if `value` is not among the choices or outside the bounds."""
        if self.choices is not None and value not in self.choices:
            nearest = difflib.get_close_matches(str(value), [str(choice) for choice in self.choices], n=1, cutoff=0.7)
            hint = self.hints.get(value, f"perhaps {nearest[0]}" if nearest else None)
            raise ValueError(f"is not {_either(self.choices)}{'' if hint is None else f': {hint}'}")
        self.bounds.check(value)


def flag(
    default: Any,
    help: str,
    *,
    choices: Sequence[Any] | None = None,
    nargs: str | None = None,
    spellings: Sequence[str] = (),
    off: Sequence[str] = (),
    negated: bool = False,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    other_than: float | None = None,
    parse: Callable[[str], Any] | None = None,
    not_served: str | None = None,
    served: Sequence[Any] = (),
    hints: Mapping[str, str] | None = None,
) -> Any:
    """A dataclass field that is a command line flag named like the field (`rollout_seed` is `--rollout-seed`).

    The annotation of the field is its type after all checks: a flag that is required, or that `derive` fills in, has
    no `| None`.

    `spellings` are further names of the flag, `off` are names that set a switch to False; with `negated` the switch
    has no name that sets it to True (it is True unless switched off). `nargs="+"` takes one or more values,
    `nargs="*"` any number. The next five bound a number. `parse` converts one word if the type alone does not define
    the conversion; it raises ValueError worded as in `FlagSpec.convert`. `not_served` marks a flag of other frameworks
    of which only the default and the values in `served` are supported: it names the alternative. `hints` has values of
    other frameworks that are not among the choices, each with what to give instead.
    """
    metadata = {
        _METADATA_KEY: {
            "help": help,
            "choices": None if choices is None else tuple(choices),
            "many": nargs is not None,
            "least": 0 if nargs == "*" else 1,
            "spellings": tuple(spellings),
            "off": tuple(off),
            "negated": negated,
            "bounds": Bounds(at_least, above, at_most, below, other_than),
            "parse": parse,
            "not_served": not_served,
            "served": tuple(served),
            "hints": dict(hints or {}),
        }
    }
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache  # rules ask for them many times, and annotations take long to evaluate
def flag_specs(group: type) -> tuple[FlagSpec, ...]:
    """The flags of a group dataclass, in the order of their declaration."""
    hints = typing.get_type_hints(group)
    return tuple(
        _spec_of_field(field, hints[field.name], group.__name__.removesuffix("Arguments"))
        for field in dataclasses.fields(group)
        if _METADATA_KEY in field.metadata
    )


def _spec_of_field(field: dataclasses.Field[Any], hint: Any, group: str) -> FlagSpec:
    declared = field.metadata[_METADATA_KEY]
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    own_name = () if declared["negated"] else ("--" + field.name.replace("_", "-"),)
    return FlagSpec(
        dest=field.name,
        group=group,
        value_type=_value_type(hint),
        many=declared["many"],
        least=declared["least"],
        default=default,
        help=declared["help"],
        choices=declared["choices"],
        bounds=declared["bounds"],
        on=own_name + declared["spellings"],
        off=declared["off"],
        parse=declared["parse"],
        not_served=declared["not_served"],
        served=declared["served"],
        hints=declared["hints"],
    )


def _value_type(hint: Any) -> type:
    """The type of one value: `int | None` is int, `list[str]` is str, `dict[...]` is dict (a JSON object).

    `Literal["a", "b"]` is str.
    """
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    if typing.get_origin(hint) is list:
        (hint,) = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return type(typing.get_args(hint)[0])
    of_values: type = typing.get_origin(hint) or hint
    return of_values


def _either(choices: tuple[Any, ...]) -> str:
    """ "a", "a or b", "a, b or c"."""
    return " or ".join(filter(None, [", ".join(map(str, choices[:-1])), str(choices[-1])]))


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("is not a whole number") from None


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("is not a number") from None
    if not math.isfinite(value):
        raise ValueError("is not a finite number")
    return value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object such as '{\"enable_thinking\": false}'")
    return value


_CONVERTERS: dict[type, Callable[[str], Any]] = {int: _whole_number, float: _number, str: str, dict: _json_object}


_NUMBER = re.compile(r"\d+")
_EXPRESSION = re.compile(r"\(?(\[[\d,]*\](\*\d+)?(\+\[[\d,]*\](\*\d+)?)*)\)?(\*\d+)?")
_TERM = re.compile(r"\[([\d,]*)\](?:\*(\d+))?")
_MAX_LAYERS = 100_000  # far above any model; keeps a typo from filling the memory


def layer_pattern(text: str) -> int | list[int]:
    """The number, or the list that the expression describes. Raises ValueError worded for `<flag> <text> ...`."""
    compact = re.sub(r"\s", "", text)
    if _NUMBER.fullmatch(compact):
        if int(compact) == 0:
            raise ValueError("is too small: it must be at least 1")
        return int(compact)
    match = _EXPRESSION.fullmatch(compact)
    if match is None:
        raise ValueError("is neither a whole number nor an expression such as [0]*3+[1]*45")
    pattern: list[int] = []
    for numbers, times in _TERM.findall(match.group(1)):
        pattern += _repeated([int(number) for number in numbers.split(",") if number], times)
    pattern = _repeated(pattern, (match.group(5) or "*1")[1:])
    if not pattern or set(pattern) - {0, 1}:
        raise ValueError("is not a list of 0 and 1, one for each layer")
    return pattern


def _repeated(numbers: list[int], times: str) -> list[int]:
    count = int(times or 1)
    if len(numbers) * count > _MAX_LAYERS:
        raise ValueError(f"describes more than {_MAX_LAYERS} layers")
    return numbers * count
