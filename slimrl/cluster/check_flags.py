"""`python -m slimrl.cluster.check_flags --entry train.py --made-later runs/x <flags`: checks the flags of a run, fast.

Reads the flags from standard input, each word terminated by a zero byte. Reports the same problems as the entry point,
except for files that do not exist yet, and starts nothing. Exit code 0, or 2 with all problems on stderr. Needs only
the standard library: --vllm-* flags, and --sglang-* flags without an installed SGLang, are not checked. The scripts
call it before they create a model, an environment or a Ray cluster.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from slimrl.arguments import Problem, read_args
from slimrl.arguments.flag import report
from slimrl.arguments.namespace import all_flag_specs
from slimrl.arguments.parser import PassthroughTables
from slimrl.cluster.main import EXIT_REFUSED
from slimrl.engines.backend import SGLANG, backend

PREFIXES = ("sglang", "vllm", "router")


def main(argv: Sequence[str]) -> int:
    """Checks the flags on standard input; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m slimrl.cluster.check_flags", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--entry", required=True, help="program that the flags are for: train.py or train_async.py")
    parser.add_argument(
        "--made-later",
        type=Path,
        metavar="FOLDER",
        help="do not check that paths in this folder exist: they are created later or elsewhere (/: any path)",
    )
    options = parser.parse_args(argv)
    flags = [os.fsdecode(word) for word in sys.stdin.buffer.read().split(b"\0")[:-1]]
    problems = early_problems(flags, options.entry, options.made_later, passthrough())
    if problems:
        print(report(problems, options.entry), file=sys.stderr)
        return EXIT_REFUSED
    return 0


def early_problems(
    flags: Sequence[str], entry: str, made_later: Path | None, passthrough: PassthroughTables
) -> list[Problem]:
    """The problems of `flags`, without those about paths in `made_later`."""
    fields = {name: spec.dest for spec in all_flag_specs() for name in spec.on + spec.off}
    flags = _without_unchecked(flags, fields, passthrough)
    args, problems = read_args(flags, entry=entry, passthrough=passthrough)
    if made_later is None:
        return problems
    folder = made_later.absolute()
    values = {name: vars(args)[field] for name, field in fields.items()}
    return [problem for problem in problems if not _is_about_a_path_in(folder, problem, values.get(problem.flag))]


def passthrough() -> PassthroughTables:
    """The flags of SGLang and the router; empty if they are not installed (yet)."""
    engine = backend(SGLANG)
    installed = all(importlib.util.find_spec(name) is not None for name in engine.packages)
    return engine.flags(()) if installed else {}


def _without_unchecked(flags: Sequence[str], own: Container[str], checked: Container[str]) -> list[str]:
    """Removes the flags, and their values, that pass through under a prefix that is not in `checked`."""
    unchecked = tuple(f"--{prefix}-" for prefix in PREFIXES if prefix not in checked)
    kept, passing = [], False
    for word in flags:
        if word.startswith("--"):
            name = word.partition("=")[0]
            passing = name.startswith(unchecked) and name not in own
        if not passing:
            kept.append(word)
    return kept


def _is_about_a_path_in(folder: Path, problem: Problem, value: Any) -> bool:
    """By the flag's value, or by the message, which may name the file of another flag."""
    words = [word for word in (value if isinstance(value, list) else [value]) if isinstance(word, str)]
    if any(os.sep in word and Path(word).absolute().is_relative_to(folder) for word in words):
        return True
    return folder != Path(folder.anchor) and f"{folder}{os.sep}" in problem.sentence


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
