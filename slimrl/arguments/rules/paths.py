"""Rules about files and folders that must be there, or must not be in the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context


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


def outputs_can_be_written(args: Arguments, context: Context) -> Iterator[Problem]:
    """No file stands where a folder is to be made."""
    for flag, value in (
        ("--save", args.save),
        ("--save-hf", args.save_hf),
        ("--runs-dir", args.runs_dir),
        ("--tensorboard-dir", args.tensorboard_dir),
        ("--wandb-dir", args.wandb_dir),
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
