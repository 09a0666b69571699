"""Rules about flags that every run needs, and about files and folders that must exist or must not be in the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from slimrl.arguments.flag import Problem
from slimrl.arguments.namespace import Arguments
from slimrl.arguments.validation.rule import Context


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


_LONGEST_NAME = 200  # bytes; file systems take 255, and names are made of it


def run_has_a_plain_name(args: Arguments, context: Context) -> Iterator[Problem]:
    """The name is one folder in --runs-dir, and no way out of it."""
    name = args.run_name
    if name is None:
        return
    fix = "give a plain name, such as my-run"
    if "/" in name or "\\" in name:
        fault, fix = "leads to another folder", f"{fix}, and its place with --runs-dir"
    elif name.startswith("."):
        fault = "begins with a dot"
    elif not name.isprintable() or name != name.strip():
        name, fault = ascii(name), "has characters that cannot be seen"
    elif (length := len(name.encode())) > _LONGEST_NAME:
        name, fault = f"{name[:20]}...", f"has {length} bytes and may have {_LONGEST_NAME}"
    else:
        return
    yield Problem("--run-name", f"--run-name {name} {fault}, and it is the name of a folder: {fix}.")


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
    templates = {
        "--save-debug-rollout-data": args.save_debug_rollout_data,
        "--save-debug-train-data": args.save_debug_train_data,
        "--load-debug-rollout-data": args.load_debug_rollout_data,
        "--load-forge-rollout-data": args.load_forge_rollout_data,
        "--ci-save-grad-norm": args.ci_save_grad_norm,
        "--ci-load-grad-norm": args.ci_load_grad_norm,
    }
    for flag, template in templates.items():
        needed = ("{rollout_id}", "{step_id}") if flag.endswith("grad-norm") else ("{rollout_id}",)
        missing = [name for name in needed if template is not None and name not in template]
        if missing:
            what = "every rollout" if "{rollout_id}" in missing else "every optimizer step of a rollout"
            yield Problem(
                flag, f"{flag} {template} gives {what} the same file: put {' and '.join(missing)} into the path."
            )
    if args.save_debug_rollout_limit is not None and args.save_debug_rollout_data is None:
        yield Problem(
            "--save-debug-rollout-limit",
            f"--save-debug-rollout-limit {args.save_debug_rollout_limit} says how many recorded rollouts are kept, and"
            " none is recorded: give --save-debug-rollout-data, or leave it out.",
        )
    if args.save_debug_rollout_data is not None and args.save_debug_rollout_data == args.save_debug_train_data:
        yield Problem(
            "--save-debug-train-data",
            f"--save-debug-train-data {args.save_debug_train_data} is --save-debug-rollout-data too: one would"
            " overwrite the other; give two paths.",
        )
    for flag in ("--load-debug-rollout-data", "--load-forge-rollout-data"):
        template = templates[flag]
        if template is not None and "{rollout_id}" in template:
            folder, pattern = Path(template).parent, Path(template).name.replace("{rollout_id}", "*")
            if "{rollout_id}" not in str(folder) and not any(folder.glob(pattern)):
                yield Problem(flag, f"{flag} {template} matches no file: check the path.")


def recorded_rollouts_have_one_use(args: Arguments, context: Context) -> Iterator[Problem]:
    """Recorded rollouts are trained on, with engines or without, in full or in part."""
    debug, forge, part = (
        args.load_debug_rollout_data,
        args.load_forge_rollout_data,
        args.load_debug_rollout_data_subsample,
    )
    if debug is not None and forge is not None:
        yield Problem(
            "--load-forge-rollout-data",
            "--load-forge-rollout-data trains on recorded rollouts with engines running and --load-debug-rollout-data"
            " without: give one of them.",
        )
    if forge is not None and (args.debug_train_only or args.debug_rollout_only):
        other = "--debug-train-only" if args.debug_train_only else "--debug-rollout-only"
        if debug is None:
            yield Problem(
                "--load-forge-rollout-data",
                f"--load-forge-rollout-data trains beside running engines and {other} leaves one side out: leave"
                f" {other} out.",
            )
    if part is not None and debug is None and forge is None:
        yield Problem(
            "--load-debug-rollout-data-subsample",
            f"--load-debug-rollout-data-subsample {part:g} is a part of recorded rollouts: give"
            " --load-debug-rollout-data too.",
        )


def checks_have_their_switch(args: Arguments, context: Context) -> Iterator[Problem]:
    """What --ci-test is told belongs to it; gradient norms are written or compared with."""
    if not args.ci_test:
        for name in ("ci_disable_kl_checker", "ci_train_rollout_logprob_abs_diff_threshold"):
            if name in context.given:
                flag = "--" + name.replace("_", "-")
                yield Problem(flag, f"{flag} belongs to --ci-test: add it, or leave {flag} out.")
    if args.ci_save_grad_norm is not None and args.ci_save_grad_norm == args.ci_load_grad_norm:
        yield Problem(
            "--ci-load-grad-norm",
            f"--ci-load-grad-norm {args.ci_load_grad_norm} is --ci-save-grad-norm too, which writes it again: give"
            " another path.",
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


_MODEL = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
_TRAINING = ("hf_checkpoint", "prompt_data", "rollout_batch_size", "rollout_max_response_len")


def model_flags_are_given(args: Arguments, context: Context) -> Iterator[Problem]:
    """The shape of the model is not guessed."""
    missing = _missing(args, context, _MODEL)
    if missing:
        names = ", ".join(missing)
        yield Problem(
            missing[0], f"{names} missing: give the flags that describe the model, for example from scripts/models/."
        )


def training_flags_are_given(args: Arguments, context: Context) -> Iterator[Problem]:
    """What every run needs besides the model."""
    spared = {"rollout_max_response_len"} if args.debug_train_only else set()
    if args.has_own_data_source or not args.rollout_global_dataset or args.only_evaluates:
        spared.add("prompt_data")
    if args.only_evaluates and all(dataset.max_response_len is not None for dataset in args.eval_datasets):
        spared.add("rollout_max_response_len")
    for name in _missing(args, context, [name for name in _TRAINING if name not in spared]):
        yield Problem(name, f"{name} is missing: every run needs it.")


def run_has_a_length(args: Arguments, context: Context) -> Iterator[Problem]:
    """--num-rollout or --num-epoch."""
    if args.num_rollout is None and args.num_epoch is None and not {"num_rollout", "num_epoch"} & context.broken:
        yield Problem("--num-rollout", "the run has no length: give --num-rollout or --num-epoch.")


def _missing(args: Arguments, context: Context, names: Sequence[str]) -> list[str]:
    values = vars(args)
    return ["--" + name.replace("_", "-") for name in names if values[name] is None and name not in context.broken]
