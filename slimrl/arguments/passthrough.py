"""Flags that belong to the installed engine or router and only pass through slimrl (`--sglang-<x>`, `--router-<x>`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from slimrl.arguments.flag import FlagSpec

SWITCH_ACTIONS = {"store_true": True, "store_false": False}


@dataclasses.dataclass(frozen=True)
class PassthroughFlag:
    """What the engine's own parser knows of one flag.

    `nargs`, `type`, `choices` and `action` ("store", "store_true" or "store_false") mean what they mean to argparse.
    `managed_by` names the slimrl flag or rule that sets this value; then a user who types the flag is told so.
    """

    dest: str
    nargs: int | str | None = None
    type: Callable[[str], Any] | None = None
    choices: tuple[Any, ...] | None = None
    action: str = "store"
    managed_by: str | None = None

    def convert(self, text: str) -> Any:
        """`text` as a value. Raises ValueError with the half sentence that completes "<flag> <text> ..."."""
        try:
            value = text if self.type is None else self.type(text)
        except (ValueError, TypeError) as error:
            raise ValueError(f"is not a value the engine takes ({error})") from None
        if self.choices is not None and value not in self.choices:
            raise ValueError(f"is not one of {', '.join(map(str, self.choices))}")
        return value


# "sglang" -> a function that lists the engine's flags by their name without "--"
PassthroughTables = Mapping[str, Callable[[], dict[str, PassthroughFlag]]]


@dataclasses.dataclass(frozen=True)
class Spelling:
    """What one spelling on the command line means: whose flag it is and, for a switch, the value it sets."""

    target: FlagSpec | PassthroughFlag
    prefix: str | None  # "sglang" or "router" for a flag that passes through
    switch_value: bool | None


def own_spellings(specs: list[FlagSpec]) -> dict[str, Spelling]:
    """Every spelling of slimrl's own flags."""
    table: dict[str, Spelling] = {}
    for spec in specs:
        table |= {name: Spelling(spec, None, True if spec.is_switch else None) for name in spec.on}
        table |= {name: Spelling(spec, None, False) for name in spec.off}
    return table


def passthrough_spellings(prefix: str, flags: dict[str, PassthroughFlag]) -> dict[str, Spelling]:
    """Every spelling of the flags that pass through under one prefix."""
    return {
        f"--{prefix}-{name}": Spelling(passed, prefix, SWITCH_ACTIONS.get(passed.action))
        for name, passed in flags.items()
    }
