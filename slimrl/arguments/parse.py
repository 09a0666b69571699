"""`parse_args`: from a command line to a checked `Arguments`, or to every problem at once and exit code 2."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from slimrl.arguments.config_file import read_config_file
from slimrl.arguments.derive import derive, take_precision_of_model
from slimrl.arguments.engines import take_context_of_engines
from slimrl.arguments.eval_datasets import resolve_eval_datasets
from slimrl.arguments.flag import FlagSpec, Problem, report
from slimrl.arguments.namespace import Arguments, all_flag_specs
from slimrl.arguments.parser import ParsedLine, PassthroughTables, parse_line
from slimrl.arguments.redact import told
from slimrl.arguments.validation import Context, check

logger = logging.getLogger(__name__)


def parse_args(
    argv: Sequence[str], *, entry: str = "train.py", passthrough: PassthroughTables | None = None
) -> Arguments:
    """Parse, derive and check a command line.

    `entry` is the program that asks: "train.py" and "train_async.py" check everything, a tool only what describes the
    model. `passthrough` maps a prefix ("sglang", "router") to a function listing the engine's flags; it is called only
    where the command line has such a flag. With problems, prints all of them to stderr and exits with code 2.
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
    notes = _add_config_file(parsed, specs, passthrough or {})
    args, found = _checked(parsed, entry)
    if parsed.guesses and found:
        # Neither what a misread word leaves out nor what a wrong guess would bring is a second problem.
        otherwise = _checked(parsed.as_guessed(), entry)[1]
        found = [problem for problem in found if problem in otherwise]
    args.notes = notes + args.notes
    return args, [*parsed.problems, *found]


def _checked(parsed: ParsedLine, entry: str) -> tuple[Arguments, list[Problem]]:
    """The arguments of a line that was read, with all that follows from them, and what the rules say of them."""
    args = Arguments(**parsed.values)
    args.sglang_options = parsed.options.get("sglang", {})
    args.router_options = parsed.options.get("router", {})
    context = Context(entry, frozenset(parsed.values), frozenset(parsed.broken))
    if context.is_training:
        take_precision_of_model(args, context.given)
        take_context_of_engines(args)
    derive(args)
    eval_problems = resolve_eval_datasets(args)
    return args, [*eval_problems, *check(args, context)]


def _add_config_file(parsed: ParsedLine, specs: list[FlagSpec], passthrough: PassthroughTables) -> list[str]:
    """Lays the values of --custom-config-path over those of the command line; says where one replaces another."""
    path = parsed.values.get("custom_config_path")
    if path is None:
        return []
    from_file = read_config_file(path, specs, passthrough)
    replaced = [
        f"{dest} is {told(dest, value)} by --custom-config-path {path} and not {told(dest, parsed.values[dest])},"
        " which the command line says."
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
