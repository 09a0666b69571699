"""Rules about where prompts come from: files and folders of data, mixes of them, or functions of the user's."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context
from slimrl.arguments.rules.paths import absent
from slimrl.data.data_path import DATA_KINDS, DataMix, DataPath


def data_files_exist(args: Arguments, context: Context) -> Iterator[Problem]:
    """Prompt and evaluation data can be opened, and their first row has the columns."""
    if args.prompt_data is not None:
        columns = {"--input-key": args.input_key, "--label-key": args.label_key}
        try:
            paths = DataMix.parse(args.prompt_data).paths
        except ValueError as error:
            yield Problem("--prompt-data", f"--prompt-data {error}.")
            paths = ()
        for path in paths:
            yield from _data_problems("--prompt-data", path, columns, args.max_bad_rows)
    flag = "--eval-prompt-data" if args.eval_config is None else "--eval-config"
    for dataset in args.eval_datasets:
        columns = {"input key": dataset.input_key, "label key": dataset.label_key}
        yield from _data_problems(flag, dataset.path, columns, 0, f" (set {dataset.name})")


def prompts_have_one_source(args: Arguments, context: Context) -> Iterator[Problem]:
    """--prompt-data, or functions of the user's that do without."""
    off = "--disable-rollout-global-dataset"
    if args.rollout_global_dataset or args.only_evaluates:
        return
    if args.prompt_data is not None and not args.has_own_data_source:
        yield Problem(off, f"{off} leaves --prompt-data unread: leave one of the two out.")
    elif not (args.has_own_data_source or args.has_own_rollout_function or args.custom_generate_function_path):
        yield Problem(
            off,
            f"{off} hands out blank samples, and nothing fills them: give --data-source-path,"
            " --custom-generate-function-path or --rollout-function-path.",
        )


def epochs_have_an_end(args: Arguments, context: Context) -> Iterator[Problem]:
    """--num-epoch alone gives the run its length where there is one epoch to speak of."""
    if args.num_epoch is None or args.num_rollout is not None:
        return
    if not args.rollout_global_dataset and not args.has_own_data_source:
        yield Problem(
            "--num-epoch",
            f"--num-epoch {args.num_epoch} counts passes over --prompt-data, and"
            " --disable-rollout-global-dataset does without: give --num-rollout.",
        )
    elif args.prompt_data is not None and "prompt_data" not in context.broken and _has_probabilities(args.prompt_data):
        yield Problem(
            "--num-epoch",
            f"--num-epoch {args.num_epoch} has no one meaning for sets that are mixed by probability, each of which"
            " ends at a time of its own: give --num-rollout.",
        )


def _has_probabilities(prompt_data: str | list[str]) -> bool:
    try:
        return DataMix.parse(prompt_data).probabilities is not None
    except ValueError:  # which is another rule's business
        return False


def _data_problems(
    flag: str, text: str, columns: dict[str, str | None], allowed: int, note: str = ""
) -> Iterator[Problem]:
    try:
        path = DataPath.parse(text).path
    except ValueError:
        yield Problem(flag, f"{flag} {text}{note} has a slice that cannot be read: write path@[start:end].")
        return
    kinds = " nor ".join(DATA_KINDS)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in DATA_KINDS)
        if not files:
            yield Problem(flag, f"{flag} {path}{note} is a folder without {kinds} files: check the path.")
    elif not path.is_file():
        yield Problem(flag, f"{flag} {path}{note} {absent(path, 'file')}: check the path.")
        return
    elif path.suffix not in DATA_KINDS:
        yield Problem(flag, f"{flag} {path}{note} is neither {kinds}: convert it to one of them.")
        return
    else:
        files = [path]
    for file in files[:1]:
        if file.suffix == ".jsonl":
            yield from _column_problems(flag, file, columns, allowed, note)


def _column_problems(
    flag: str, path: Path, columns: dict[str, str | None], allowed: int, note: str
) -> Iterator[Problem]:
    """The first row stands for all: a wrong column name is wrong in every row."""
    try:
        row = _first_row(path, allowed)
    except ValueError as error:
        yield Problem(flag, f"{flag} {path}{note} {error}.")
        return
    for name, column in columns.items():
        if column is not None and column not in row:
            yield Problem(
                flag,
                f"{flag} {path}{note} has no column {column!r} ({name}) but {', '.join(map(repr, row))}:"
                f" set {name} to one of them.",
            )


def _first_row(path: Path, allowed: int) -> dict[str, Any]:
    """The first row that is an object, behind at most `allowed` others. Raises ValueError saying why there is none."""
    try:
        with path.open(encoding="utf-8") as file:
            lines = list(itertools.islice((line for line in file if line.strip()), allowed + 1))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read as UTF-8 text ({error}): convert it, or check the path") from error
    reason = "is empty: give a file with at least one row"
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError as error:
            reason = f"has a first row that is not JSON ({error}): write one object per line"
            continue
        if isinstance(row, dict):
            return row
        reason = "has a first row that is not a JSON object: write one object per line"
    raise ValueError(reason)
