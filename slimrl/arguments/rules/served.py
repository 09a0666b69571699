"""Flags that users of other systems know and of which this version serves only some values."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.flag import FlagSpec
from slimrl.arguments.namespace import Arguments, all_flag_specs
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context


def values_are_served(args: Arguments, context: Context) -> Iterator[Problem]:
    """Nothing is accepted and then ignored: what a flag's declaration does not serve is refused in its words."""
    values = vars(args)
    for spec in all_flag_specs():
        if spec.dest in context.given and spec.dest not in context.broken and spec.refuses(values[spec.dest]):
            yield Problem(spec.name, f"{_as_typed(spec, values[spec.dest])} is not served: {spec.not_served}.")


def _as_typed(spec: FlagSpec, value: object) -> str:
    if spec.is_switch:
        return spec.on[0] if value and spec.on else spec.off[0]
    if isinstance(value, list):
        return " ".join([spec.name, *map(str, value)])
    return f"{spec.name} {value}"
