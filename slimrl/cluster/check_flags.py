"""`python -m slimrl.cluster.check_flags --entry train.py --made-later runs/x <flags`: the flags of a run, in a second.

They come on standard input, each word ended by a zero byte. Promises to say what the entry would say of them, but for
files that are not here yet, and to start nothing. Exit code 0, or 2 with all problems on stderr. Needs the standard
library alone; without SGLang its flags are taken as they are. Called by the scripts before they make a model, an
environment or a Ray cluster.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

from slimrl.arguments import Problem, read_args
from slimrl.arguments.flag import report
from slimrl.arguments.namespace import all_flag_specs
from slimrl.cluster.main import EXIT_REFUSED, passthrough_flags


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
        help="what flags name in this folder is not looked for: it is made later or elsewhere (/: any path)",
    )
    options = parser.parse_args(argv)
    flags = [os.fsdecode(word) for word in sys.stdin.buffer.read().split(b"\0")[:-1]]
    problems = early_problems(flags, options.entry, options.made_later, passthrough())
    if problems:
        print(report(problems, options.entry), file=sys.stderr)
        return EXIT_REFUSED
    return 0


def early_problems(
    flags: Sequence[str], entry: str, made_later: Path | None, passthrough: dict[str, Callable]
) -> list[Problem]:
    """What is wrong with `flags`, without what is said of paths in `made_later`."""
    fields = {name: spec.dest for spec in all_flag_specs() for name in spec.on + spec.off}
    if not passthrough:
        flags = _without_passed_on(flags, fields)
    args, problems = read_args(flags, entry=entry, passthrough=passthrough)
    if made_later is None:
        return problems
    folder = made_later.absolute()
    values = {name: vars(args)[field] for name, field in fields.items()}
    return [problem for problem in problems if not _is_about_a_path_in(folder, problem, values.get(problem.flag))]


def passthrough() -> dict[str, Callable]:
    """The engines' flags; none where the engines are not installed (yet)."""
    known = all(importlib.util.find_spec(name) is not None for name in ("sglang", "sglang_router"))
    return passthrough_flags() if known else {}


def _without_passed_on(flags: Sequence[str], own: Container[str]) -> list[str]:
    kept, passing = [], False
    for word in flags:
        if word.startswith("--"):
            name = word.partition("=")[0]
            passing = name.startswith(("--sglang-", "--router-")) and name not in own
        if not passing:
            kept.append(word)
    return kept


def _is_about_a_path_in(folder: Path, problem: Problem, value: Any) -> bool:
    """By the value of the flag, and by the sentence, as of a flag that is modelled on the file of another one."""
    words = [word for word in (value if isinstance(value, list) else [value]) if isinstance(word, str)]
    if any(os.sep in word and Path(word).absolute().is_relative_to(folder) for word in words):
        return True
    return folder != Path(folder.anchor) and f"{folder}{os.sep}" in problem.sentence


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
