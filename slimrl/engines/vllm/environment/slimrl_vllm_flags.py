"""Prints the flags of `vllm serve` as JSON: `python slimrl_vllm_flags.py`. Runs in vLLM's environment.

Each is {"names", "kind", "nargs", "choices", "action"}; `kind` is "int", "float" or "str", the last also for values
that only vLLM can read. Importing vllm takes seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

MARK = "slimrl_vllm_flags:"  # at the start of the line: vllm prints others
KINDS: dict[Any, str] = {int: "int", float: "float"}


def described(action: argparse.Action) -> dict[str, Any] | None:
    """One flag; None for a positional argument and for --help."""
    names = [name.removeprefix("--") for name in action.option_strings if name.startswith("--")]
    if not names or isinstance(action, argparse._HelpAction):
        return None
    if isinstance(action, argparse.BooleanOptionalAction):
        kind = "optional_switch"
    elif action.nargs == 0:
        kind = "store_true"
    else:
        kind = "store"
    plain = all(isinstance(choice, str | int) for choice in action.choices or ())
    return {
        "names": names,
        "kind": KINDS.get(action.type, "str"),
        "nargs": action.nargs if action.nargs in ("+", "*") or isinstance(action.nargs, int) else None,
        "choices": list(action.choices) if action.choices and plain else None,
        "action": kind,
    }


def main() -> None:
    """Prints one line."""
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    actions = make_arg_parser(FlexibleArgumentParser())._actions
    flags = [flag for flag in map(described, actions) if flag is not None]
    sys.stdout.write(f"{MARK}{json.dumps(flags)}\n")


if __name__ == "__main__":
    main()
