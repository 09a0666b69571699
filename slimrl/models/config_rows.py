"""The row types of the config.json tables, one rule per flag; and the rows of rotary positions.

A row computes the value of a flag from config.json. Keys that are missing there have the defaults of the model class.
`Unsupported` rows are settings of a config.json that slimrl cannot train.

Rotary positions are read from `rope_parameters` in newer files, and from `rope_theta` and `rope_scaling` in older ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Value:
    """A flag that takes a value.

    `read` returns the value in config.json, or None if the model has no such thing; `absent` describes that in
    messages. If `absent` is None, None means that the file does not say and nothing is compared. `keys` are the
    possible keys in the file, for messages. `unset` is the value of an omitted flag; None means no such thing if
    `absent` is set, otherwise that another rule requires the flag.
    """

    field: str
    keys: tuple[str, ...]
    read: Callable[[Config], Any]
    absent: str | None = None
    unset: Any = None

    def key(self, config: Config) -> str:
        """The key that the file uses."""
        return next((key for key in self.keys if key in config), self.keys[0])

    def stated(self, config: Config) -> Any:
        """The field's value as config.json states it."""
        return self.read(config)


@dataclasses.dataclass(frozen=True)
class Switch:
    """A flag without a value: `flag` is its spelling, `says` what a message quotes from config.json."""

    field: str
    flag: str
    is_on: Callable[[Config], bool]
    says: Callable[[Config], str]

    def stated(self, config: Config) -> bool:
        """The field's value as config.json states it; a flag that disables something sets its field to False."""
        return self.is_on(config) is not self.flag.startswith("--disable")


@dataclasses.dataclass(frozen=True)
class LayerPattern(Value):
    """A flag with 0 or 1 for each layer, or a number N for every N-th."""


Row = Value | Switch


@dataclasses.dataclass(frozen=True)
class Unsupported:
    """A setting of config.json that cannot be trained: `found` returns its description, or None."""

    found: Callable[[Config], str | None]


@dataclasses.dataclass(frozen=True)
class FamilyTable:
    """The mapping from one family's config.json to flags.

    `rows` by field of `Arguments`; `unserved` are settings that a config.json may have and slimrl cannot train.
    """

    rows: dict[str, Row]
    unserved: tuple[Unsupported, ...]


def value(field: str, *keys: str, default: Any = None, absent: str | None = None, unset: Any = None) -> Value:
    """The flag has the value of the first of `keys` in the file, or `default`."""
    return Value(field, keys, lambda config: first(config, *keys, default=default), absent, unset)


def computed(
    field: str, key: str, read: Callable[[Config], Any], absent: str | None = None, unset: Any = None
) -> Value:
    """`read` computes the flag from the file; `key` is its name in messages."""
    return Value(field, (key,), read, absent, unset)


def not_there(field: str, absent: str) -> Value:
    """The family never has this setting."""
    return Value(field, (field,), lambda _: None, absent)


def always(field: str, flag: str, on: bool) -> Switch:
    """The family always has it, or never has it, regardless of config.json."""
    return Switch(field, flag, lambda _: on, lambda config: f"model_type {config['model_type']!r}")


def switched(field: str, flag: str, key: str, *, default: bool, reverse: bool = False) -> Switch:
    """The flag is given if `key` is true; with `reverse`, if `key` is false."""

    def stated(config: Config) -> bool:
        return bool(first(config, key, default=default))

    return Switch(
        field, flag, lambda config: stated(config) is not reverse, lambda config: f"{key} {str(stated(config)).lower()}"
    )


def wrong(key: str, served: Any) -> Unsupported:
    """Any value of `key` but `served` (or none) cannot be trained."""

    def found(config: Config) -> str | None:
        given = first(config, key, default=served)
        text = str(given).lower() if isinstance(given, bool) else repr(given)
        return None if given == served else f"{key} {text}"

    return Unsupported(found)


def first(config: Config, *keys: str, default: Any = None) -> Any:
    """The value of the first key that is in the file with a value."""
    return next((config[key] for key in keys if config.get(key) is not None), default)


_OLDER_KEYS = ("rope_theta", "partial_rotary_factor")


def settings(config: Config) -> dict[str, Any]:
    """The rotary settings of newer and older files in one dictionary."""
    older = {key: config[key] for key in _OLDER_KEYS if config.get(key) is not None}
    nested = [config.get(key) for key in ("rope_scaling", "rope_parameters")]
    for entries in nested:
        older |= entries if isinstance(entries, dict) else {}
    return older


def kind(config: Config) -> str:
    """`default` for plain rotary positions, else the name of the scaling."""
    rope = settings(config)
    return rope.get("rope_type", rope.get("type", "default"))


def base() -> Value:
    """Theta, as an int if it is a whole number."""

    def read(config: Config) -> int | float:
        theta = settings(config).get("rope_theta", 10000)
        return int(theta) if theta == int(theta) else theta

    return computed("rotary_base", "rope_theta", read)


def percent(default: float) -> Value:
    """The fraction of a head's channels that is rotated."""
    return computed(
        "rotary_percent",
        "partial_rotary_factor",
        lambda config: settings(config).get("partial_rotary_factor", default),
    )


def llama3_scaling() -> Switch:
    """Llama 3's scaling of the frequencies."""
    return Switch(
        "use_rope_scaling",
        "--use-rope-scaling",
        lambda config: kind(config) == "llama3",
        lambda config: "llama3 rope scaling" if kind(config) == "llama3" else "no llama3 rope scaling",
    )


def llama3_factor() -> Value:
    """Its factor."""
    return computed(
        "rope_scaling_factor",
        "rope factor",
        lambda config: settings(config).get("factor") if kind(config) == "llama3" else None,
    )


def yarn(field: str, key: str, default: float | None = None) -> Value:
    """One setting of YaRN; absent for plain positions."""
    return computed(
        field, f"rope {key}", lambda config: settings(config).get(key, default) if kind(config) == "yarn" else None
    )


def scaling_factor() -> Value:
    """YaRN's factor; a factor of 1 means plain rotary positions."""
    return computed(
        "rotary_scaling_factor",
        "rope factor",
        lambda config: settings(config)["factor"] if kind(config) == "yarn" else 1.0,
    )


def yarn_type() -> Value:
    """--rope-type, which has no effect at a factor of 1."""
    return computed("rope_type", "rope type", lambda config: "yarn" if kind(config) == "yarn" else None, unset="yarn")


def only(*served: str) -> Unsupported:
    """Kinds of positions other than `served` cannot be trained."""
    return Unsupported(lambda config: None if kind(config) in served else f"rope type {kind(config)!r}")


def yarn_with_own_factor() -> Unsupported:
    """Settings of YaRN that Megatron has no flag for, or computes differently from transformers."""

    def found(config: Config) -> str | None:
        rope = settings(config)
        if kind(config) != "yarn":
            return None
        if rope.get("attention_factor") is not None:
            return f"rope attention_factor {rope['attention_factor']}"
        if rope.get("truncate", True) is False:
            return "rope truncate false"
        if not rope.get("mscale_all_dim") and (rope.get("mscale") or 1.0) != 1.0:
            return f"rope mscale {rope['mscale']} without mscale_all_dim"
        return None

    return Unsupported(found)
