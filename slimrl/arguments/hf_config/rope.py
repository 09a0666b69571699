"""Rotary positions in config.json: `rope_parameters` in newer files, `rope_theta` and `rope_scaling` in older ones."""

from __future__ import annotations

from typing import Any

from slimrl.arguments.hf_config.row import Config, Switch, Unserved, Value, computed

_OLDER_KEYS = ("rope_theta", "partial_rotary_factor")


def settings(config: Config) -> dict[str, Any]:
    """All of them under one roof."""
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
    """Theta, a whole number where it is one."""

    def read(config: Config) -> int | float:
        theta = settings(config).get("rope_theta", 10000)
        return int(theta) if theta == int(theta) else theta

    return computed("rotary_base", "rope_theta", read)


def percent(default: float) -> Value:
    """The part of a head that is rotated."""
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
    """One setting of YaRN, which plain positions do not have."""
    return computed(
        field, f"rope {key}", lambda config: settings(config).get(key, default) if kind(config) == "yarn" else None
    )


def scaling_factor() -> Value:
    """YaRN's factor; a factor of 1 is plain rotary positions."""
    return computed(
        "rotary_scaling_factor",
        "rope factor",
        lambda config: settings(config)["factor"] if kind(config) == "yarn" else 1.0,
    )


def yarn_type() -> Value:
    """--rope-type, which decides nothing at a factor of 1."""
    return computed("rope_type", "rope type", lambda config: "yarn" if kind(config) == "yarn" else None, unset="yarn")


def only(*served: str) -> Unserved:
    """Kinds of positions other than `served` cannot be trained."""
    return Unserved(lambda config: None if kind(config) in served else f"rope type {kind(config)!r}")


def yarn_with_own_factor() -> Unserved:
    """Settings of YaRN that Megatron has no flag for, or computes otherwise than transformers does."""

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

    return Unserved(found)
