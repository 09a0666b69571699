"""Rules about files and folders that must be there, or must not be in the way."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context

_DATA_KINDS = (".jsonl", ".parquet")


def hf_checkpoint_exists(args: Arguments, context: Context) -> Iterator[Problem]:
    """A folder with config.json, and for training a tokenizer."""
    if args.hf_checkpoint is None:
        return
    folder = Path(args.hf_checkpoint)
    if not folder.is_dir():
        yield Problem(
            "--hf-checkpoint",
            f"--hf-checkpoint {folder} {absent(folder)}: give the folder of a Hugging Face model.",
        )
    elif not (folder / "config.json").is_file():
        yield Problem(
            "--hf-checkpoint",
            f"--hf-checkpoint {folder} has no config.json: give the folder that holds the model's files.",
        )


def data_files_exist(args: Arguments, context: Context) -> Iterator[Problem]:
    """Prompt and evaluation data can be opened, and their first row has the columns."""
    if args.prompt_data is not None:
        columns = {"--input-key": args.input_key, "--label-key": args.label_key}
        yield from _data_problems("--prompt-data", args.prompt_data, columns)
    flag = "--eval-prompt-data" if args.eval_config is None else "--eval-config"
    for dataset in args.eval_datasets:
        columns = {"input key": dataset.input_key, "label key": dataset.label_key}
        yield from _data_problems(flag, dataset.path, columns, f" (set {dataset.name})")


def _data_problems(flag: str, text: str, columns: dict[str, str | None], note: str = "") -> Iterator[Problem]:
    path_text, marker, bounds = text.partition("@[")
    path = Path(path_text)
    if marker and not re.fullmatch(r"(-?\d+)?:(-?\d+)?\]", bounds):
        yield Problem(flag, f"{flag} {text}{note} has a slice that cannot be read: write path@[start:end].")
    elif not path.is_file():
        yield Problem(flag, f"{flag} {path}{note} {absent(path, 'file')}: check the path.")
    elif path.suffix not in _DATA_KINDS:
        yield Problem(flag, f"{flag} {path}{note} is neither {' nor '.join(_DATA_KINDS)}: convert it to one of them.")
    elif path.suffix == ".jsonl":
        yield from _column_problems(flag, path, columns, note)


def _column_problems(flag: str, path: Path, columns: dict[str, str | None], note: str) -> Iterator[Problem]:
    """The first row stands for all: a wrong column name is wrong in every row."""
    try:
        with path.open(encoding="utf-8") as file:
            first = next((line for line in file if line.strip()), None)
    except (OSError, UnicodeDecodeError) as error:
        yield Problem(
            flag, f"{flag} {path}{note} cannot be read as UTF-8 text ({error}): convert it, or check the path."
        )
        return
    if first is None:
        yield Problem(flag, f"{flag} {path}{note} is empty: give a file with at least one row.")
        return
    try:
        row = json.loads(first)
    except ValueError as error:
        yield Problem(
            flag, f"{flag} {path}{note} has a first row that is not JSON ({error}): write one object per line."
        )
        return
    if not isinstance(row, dict):
        yield Problem(
            flag, f"{flag} {path}{note} has a first row that is not a JSON object: write one object per line."
        )
        return
    for name, column in columns.items():
        if column is not None and column not in row:
            yield Problem(
                flag,
                f"{flag} {path}{note} has no column {column!r} ({name}) but {', '.join(map(repr, row))}:"
                f" set {name} to one of them.",
            )


def outputs_can_be_written(args: Arguments, context: Context) -> Iterator[Problem]:
    """No file stands where a folder is to be made."""
    for flag, value in (
        ("--save", args.save),
        ("--runs-dir", args.runs_dir),
        ("--tensorboard-dir", args.tensorboard_dir),
        ("--update-weight-disk-dir", args.update_weight_disk_dir),
    ):
        if value is not None:
            file = next((path for path in (Path(value), *Path(value).parents) if path.is_file()), None)
            if file is not None:
                yield Problem(flag, f"{flag} {value} cannot be a folder, {file} is a file: choose another path.")


def dump_templates_name_the_rollout(args: Arguments, context: Context) -> Iterator[Problem]:
    """One file per rollout; a rollout that is to be replayed must be there."""
    for flag, template in (
        ("--save-debug-rollout-data", args.save_debug_rollout_data),
        ("--load-debug-rollout-data", args.load_debug_rollout_data),
    ):
        if template is not None and "{rollout_id}" not in template:
            yield Problem(
                flag, f"{flag} {template} gives every rollout the same file: put {{rollout_id}} into the path."
            )
    template = args.load_debug_rollout_data
    if template is not None and "{rollout_id}" in template:
        folder, pattern = Path(template).parent, Path(template).name.replace("{rollout_id}", "*")
        if "{rollout_id}" not in str(folder) and not any(folder.glob(pattern)):
            yield Problem(
                "--load-debug-rollout-data",
                f"--load-debug-rollout-data {template} matches no file: check the path.",
            )


def charts_have_their_switch(args: Arguments, context: Context) -> Iterator[Problem]:
    """A place for TensorBoard's files asks for them."""
    for name in ("tensorboard_dir", "tb_project_name", "tb_experiment_name"):
        if name in context.given and not args.use_tensorboard:
            flag = "--" + name.replace("_", "-")
            yield Problem(flag, f"{flag} {vars(args)[name]} belongs to --use-tensorboard: add it, or leave {flag} out.")


def disk_transport_has_a_folder(args: Arguments, context: Context) -> Iterator[Problem]:
    """Weights that go by files need a place for them."""
    if args.update_weight_transport == "disk" and args.update_weight_disk_dir is None:
        yield Problem(
            "--update-weight-disk-dir", "--update-weight-transport disk needs --update-weight-disk-dir: give a folder."
        )
    if args.update_weight_transport != "disk" and args.update_weight_disk_dir is not None:
        yield Problem(
            "--update-weight-disk-dir",
            f"--update-weight-disk-dir {args.update_weight_disk_dir} is used by --update-weight-transport disk only:"
            " add it, or leave the folder out.",
        )


def absent(path: Path, kind: str = "folder") -> str:
    """Why `path` is not such a thing, and how far it leads: "does not exist (only /data of it does)"."""
    if path.exists():
        return f"is not a {kind}"
    parent = next((parent for parent in path.absolute().parents if parent.is_dir()), Path("/"))
    return f"does not exist (only {parent} of it does)"
