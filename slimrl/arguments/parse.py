"""`parse_args` turns a command line into checked `Arguments`, or reports all its problems and exits with code 2."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from slimrl.arguments.config_file import ROLES_FLAG, read_config_file, read_roles
from slimrl.arguments.derive import derive, take_distributed_optimizer, take_precision_of_model, take_vision_of_model
from slimrl.arguments.engine_groups import resolve_server_models
from slimrl.arguments.eval_datasets import resolve_eval_datasets
from slimrl.arguments.flag import FlagSpec, Problem, report
from slimrl.arguments.hf_config import take_context_of_engines
from slimrl.arguments.namespace import Arguments, all_flag_specs
from slimrl.arguments.parser import ParsedLine, PassthroughTables, parse_line
from slimrl.arguments.redact import redact_flag
from slimrl.arguments.validation import Context, check

logger = logging.getLogger(__name__)


def parse_args(
    argv: Sequence[str], *, entry: str = "train.py", passthrough: PassthroughTables | None = None
) -> Arguments:
    """Parse, derive and check a command line.

    `entry` is the calling program: "train.py" and "train_async.py" check all flags, a tool only the model flags.
    `passthrough` maps a prefix ("sglang", "vllm", "router") to a function that lists the engine's flags; it is called
    only if the command line has such a flag. With problems, prints all of them to stderr and exits with code 2.
    """
    if {"-h", "--help"} & set(argv):
        from slimrl.arguments.docs import help_text

        print(help_text(Path(entry).name))
        sys.exit(0)
    args, problems = read_args(argv, entry=entry, passthrough=passthrough)
    if problems:
        _exit_with(problems, entry)
    for note in args.notes:
        logger.warning(note)
    return args


def read_args(
    argv: Sequence[str], *, entry: str = "train.py", passthrough: PassthroughTables | None = None
) -> tuple[Arguments, list[Problem]]:
    """Like `parse_args`, but returns the problems instead of printing them; prints nothing and never exits."""
    entry = Path(entry).name
    specs = all_flag_specs()
    parsed = parse_line(argv, specs, passthrough or {})
    notes = _add_config_file(parsed, specs, passthrough or {}) + _add_roles(parsed, specs)
    args, found = _checked(parsed, entry, passthrough or {})
    if parsed.guesses and found:
        # report only problems that exist both with and without the guesses
        otherwise = _checked(parsed.as_guessed(), entry, passthrough or {})[1]
        found = [problem for problem in found if problem in otherwise]
    args.notes = notes + args.notes
    return args, [*parsed.problems, *found]


def _checked(parsed: ParsedLine, entry: str, passthrough: PassthroughTables) -> tuple[Arguments, list[Problem]]:
    """The arguments of a parsed line with derived values, and the problems that the rules find."""
    args = Arguments(**parsed.values)
    args.sglang_options = parsed.options.get("sglang", {})
    args.vllm_options = parsed.options.get("vllm", {})
    args.router_options = parsed.options.get("router", {})
    context = Context(entry, frozenset(parsed.values), frozenset(parsed.broken))
    if context.is_training:
        take_precision_of_model(args, context.given)
        take_distributed_optimizer(args, context.given)
    take_vision_of_model(args)
    derive(args)
    problems = []
    if context.is_training:
        problems += resolve_server_models(args, passthrough)
        take_context_of_engines(args)
    problems += resolve_eval_datasets(args)
    return args, [*problems, *check(args, context)]


def _add_config_file(parsed: ParsedLine, specs: list[FlagSpec], passthrough: PassthroughTables) -> list[str]:
    """Overrides the command line with --custom-config-path; returns a sentence for each replaced value."""
    path = parsed.values.get("custom_config_path")
    if path is None:
        return []
    from_file = read_config_file(path, specs, passthrough)
    return _override(parsed, from_file, f"--custom-config-path {path}")


def _add_roles(parsed: ParsedLine, specs: list[FlagSpec]) -> list[str]:
    """The same with --megatron-config-path."""
    path = parsed.values.get("megatron_config_path")
    return [] if path is None else _override(parsed, read_roles(path, specs, parsed.values), f"{ROLES_FLAG} {path}")


def _override(parsed: ParsedLine, from_file: ParsedLine, file: str) -> list[str]:
    replaced = [
        f"{dest} is {redact_flag(dest, value)} from {file}, which overrides"
        f" {redact_flag(dest, parsed.values[dest])} from the command line."
        for dest, value in from_file.values.items()
        if parsed.values.get(dest, value) != value
    ]
    parsed.values |= from_file.values
    for prefix, options in from_file.options.items():
        parsed.options[prefix] |= options
    parsed.problems += from_file.problems
    parsed.broken |= from_file.broken
    return replaced


def _exit_with(problems: Sequence[Problem], entry: str) -> NoReturn:
    print(report(problems, Path(entry).name), file=sys.stderr)
    sys.exit(2)
