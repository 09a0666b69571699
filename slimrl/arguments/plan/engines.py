"""The servers that would be started: slots, model, flags. Ports are chosen when they start."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.plan.layout import Placement
from slimrl.arguments.secrets import told


@dataclasses.dataclass(frozen=True)
class Server:
    """One SGLang server; `slots` are positions in the placement."""

    index: int
    slots: range
    seed: int
    log: str


def servers(args: Arguments, where: Placement) -> list[Server]:
    """Every server, in order."""
    return [
        Server(index, slots, args.rollout_seed + index, f"{args.run_dir}/logs/sglang{index}.log")
        for index, slots in enumerate(where.engines)
    ]


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Options by the engine's own names as flags, for reading: {"dtype": "auto"} is ["--dtype auto"]."""
    words = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        told_value = told(name, value)
        shown = " ".join(map(str, told_value)) if isinstance(told_value, list | tuple) else str(told_value)
        words.append(flag if value is True else f"{flag} {shown}")
    return words


def server_defaults(words: Sequence[str]) -> dict[str, Any]:
    """`--name=value` words as options by name; a word without a value is True."""
    pairs = (word.removeprefix("--").partition("=") for word in words)
    return {name.replace("-", "_"): value if equals else True for name, equals, value in pairs}
