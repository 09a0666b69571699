"""Rules about torch_dist checkpoints, and about the tokenizer and weights in the folder of --hf-checkpoint.

A checkpoint folder holds `latest_checkpointed_iteration.txt`, which names `release` or an iteration, and the folder
`release` or `iter_<7 digits>` that it names. The path of such an inner folder is accepted too, and so is the folder of
a Hugging Face model, which gives weights and nothing to resume. A wrong path is not taken for a fresh start, and a
damaged checkpoint is named before any process starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from slimrl.arguments.checkpoints import REPLACED, damage, folder_name, is_hf_model, placed
from slimrl.arguments.checkpoints import TRACKER_NAME as TRACKER
from slimrl.arguments.flag import Problem
from slimrl.arguments.hf_config import disagreements
from slimrl.arguments.namespace import Arguments
from slimrl.arguments.validation.paths import absent
from slimrl.arguments.validation.rule import Context
from slimrl.models.hf_folder import read_tokenizer_files, weights_fault

_COMPLETE = "metadata.json"  # is in every complete iteration's folder
_ITERATION = re.compile(r"iter_(\d{7})|release")
_ROLLOUT = "{rollout_id}"


def weights_have_a_source(args: Arguments, context: Context) -> Iterator[Problem]:
    """--load, or for a fresh start --ref-load; a KL needs --ref-load in any case."""
    if args.debug_rollout_only or "ref_load" in context.broken:
        return
    if args.ref_load is None and args.use_reference and not args.only_evaluates:
        cause = f"--kl-coef {args.kl_coef:g}" if args.kl_coef != 0 else "--use-kl-loss"
        yield Problem(
            "--ref-load", f"{cause} compares with a reference model and --ref-load is missing: give its checkpoint."
        )
    elif args.ref_load is not None:
        return
    elif args.load is None:
        yield Problem("--ref-load", "there are no weights to start from: give --ref-load (or --load to resume).")
    elif _is_fresh(Path(args.load)):
        yield Problem(
            "--load", f"--load {args.load} holds no checkpoint yet and --ref-load is missing: give the first weights."
        )


def ref_load_is_a_checkpoint(args: Arguments, context: Context) -> Iterator[Problem]:
    """The reference is read at every start."""
    if args.ref_load is not None and not args.debug_rollout_only:
        folder = Path(args.ref_load)
        if not folder.is_dir():
            yield Problem(
                "--ref-load",
                f"--ref-load {folder} {absent(folder)}: make it with tools/convert_hf_to_torch_dist.py, or give the"
                " Hugging Face folder itself.",
            )
        else:
            yield from _checkpoint_problems("--ref-load", folder, "--ref-ckpt-step", args.ref_ckpt_step)


def load_is_a_checkpoint_or_new(args: Arguments, context: Context) -> Iterator[Problem]:
    """Empty is a fresh start, and so is an absent folder that the run saves to; all else must be a checkpoint."""
    if args.debug_rollout_only or args.load is None:
        if args.ckpt_step is not None and args.load is None:
            yield Problem("--ckpt-step", f"--ckpt-step {args.ckpt_step} chooses from --load: give it, or leave it out.")
        return
    folder = Path(args.load)
    if folder.exists() and not folder.is_dir():
        yield Problem("--load", f"--load {folder} is a file: give the checkpoint's folder.")
    elif not _is_fresh(folder):
        yield from _checkpoint_problems("--load", folder, "--ckpt-step", args.ckpt_step)
    elif args.ckpt_step is not None:
        yield Problem(
            "--ckpt-step",
            f"--ckpt-step {args.ckpt_step} is not in --load {folder}, which holds no checkpoint: drop it.",
        )
    elif not folder.exists() and not _saves_to(folder, args):
        yield Problem(
            "--load",
            f"--load {folder} {absent(folder)}, and it is not where --save writes to: fix the path, or make the"
            " folder for a fresh start.",
        )


def _saves_to(folder: Path, args: Arguments) -> bool:
    """True where --save is `folder`, or still to be given (which is another rule's)."""
    return args.save_interval is not None if args.save is None else folder.absolute() == Path(args.save).absolute()


def saving_is_complete(args: Arguments, context: Context) -> Iterator[Problem]:
    """--save-interval says when, --save says where."""
    if args.save_interval is not None and args.save is None and "save" not in context.broken:
        yield Problem("--save", f"--save-interval {args.save_interval} needs --save: give a folder.")
    for flag, value in (
        ("--save-hf", args.save_hf),
        ("--save-retain-interval", args.save_retain_interval),
        ("--save-total-limit", args.save_total_limit),
        ("--async-save", args.async_save or None),
    ):
        if value is not None and args.save is None and "save" not in context.broken:
            shown = "" if value is True else f" {value}"
            yield Problem("--save", f"{flag}{shown} is about checkpoints and needs --save: give a folder.")


def retention_fits_saving(args: Arguments, context: Context) -> Iterator[Problem]:
    """What is kept is saved at all, and nothing that the run still needs is deleted."""
    kept, every = args.save_retain_interval, args.save_interval
    if kept is not None and every is not None and kept % every != 0:
        yield Problem(
            "--save-retain-interval",
            f"--save-retain-interval {kept} is no multiple of --save-interval {every}: not every checkpoint to keep"
            f" would be written; give {kept - kept % every + every}.",
        )
    deletes = kept is not None or args.save_total_limit is not None
    if deletes and args.save is not None and args.ref_load is not None:
        folder, root = Path(args.ref_load).absolute(), Path(args.save).absolute()
        if root in (folder, folder.parent):
            yield Problem(
                "--ref-load",
                f"--ref-load {args.ref_load} is in --save {args.save}, where --save-total-limit and"
                " --save-retain-interval delete: copy the reference to a folder of its own.",
            )


def exports_have_a_place(args: Arguments, context: Context) -> Iterator[Problem]:
    """--save-hf gives each rollout a folder of its own, modelled on one with weights."""
    if args.save_hf is None or "save_hf" in context.broken:
        return
    if _ROLLOUT not in args.save_hf or set("{}") & set(args.save_hf.replace(_ROLLOUT, "")):
        yield Problem(
            "--save-hf",
            f"--save-hf {args.save_hf} must name the rollout, and nothing else, in braces: put {_ROLLOUT} into the"
            " path once.",
        )
    elif args.save is not None and _ITERATION.fullmatch(Path(args.save_hf).name.replace(_ROLLOUT, "0000000")):
        yield Problem(
            "--save-hf", f"--save-hf {args.save_hf} looks like a checkpoint of training: choose another name."
        )
    if args.hf_checkpoint is not None and not any(Path(args.hf_checkpoint).glob("*.safetensors")):
        yield Problem(
            "--save-hf",
            f"--save-hf is modelled on --hf-checkpoint {args.hf_checkpoint}, which has no weights (*.safetensors): copy"
            " them too, or convert checkpoints with tools/convert_torch_dist_to_hf.py.",
        )


def hf_models_agree(args: Arguments, context: Context) -> Iterator[Problem]:
    """Weights that are read from a Hugging Face folder have the shape that the flags describe."""
    for flag, value in (("--load", args.load), ("--ref-load", args.ref_load)):
        if value is None or value == args.hf_checkpoint or args.debug_rollout_only or not is_hf_model(Path(value)):
            continue
        try:
            config = json.loads((Path(value) / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            yield Problem(flag, f"{flag} {value}/config.json is not JSON ({error}): copy the model again.")
            continue
        for problem in disagreements(args, config):
            yield Problem(flag, f"{flag} {value}: {problem.sentence}")


def saved_apart_from_a_model(args: Arguments, context: Context) -> Iterator[Problem]:
    """Checkpoints are not written among the files of a Hugging Face model."""
    if args.save is not None and is_hf_model(Path(args.save)):
        yield Problem("--save", f"--save {args.save} is a Hugging Face model: give a folder of its own.")


def _is_fresh(folder: Path) -> bool:
    """True where no checkpoint was ever finished: the folder is absent, or holds only hidden and unfinished files."""
    if not folder.exists():
        return True
    return folder.is_dir() and all(path.name.startswith(".") or path.suffix == ".tmp" for path in folder.iterdir())


def _checkpoint_problems(flag: str, folder: Path, step_flag: str, step: int | None) -> Iterator[Problem]:
    if (folder / _COMPLETE).is_file():
        if step is not None and folder.name != f"iter_{step:07d}":
            yield Problem(
                step_flag, f"{step_flag} {step} chooses an iteration and {flag} {folder} is one already: drop it."
            )
        else:
            yield from _damage(flag, folder)
        return  # one iteration by its own path
    if is_hf_model(folder):
        if step is not None:
            yield Problem(
                step_flag,
                f"{step_flag} {step} chooses an iteration and {flag} {folder} is a Hugging Face model: drop it.",
            )
        return
    tracker = folder / TRACKER
    names = {path.name.removesuffix(REPLACED) for path in folder.iterdir()}
    present = sorted(name for name in names if _ITERATION.fullmatch(name))
    if step is not None:
        if folder_name(step) in present:
            yield from _damage(flag, placed(folder, folder_name(step)))
        else:
            yield Problem(
                step_flag, f"{step_flag} {step} is not in {flag} {folder}, which holds {_listed(present)}: choose one."
            )
    elif not tracker.is_file():
        yield Problem(flag, f"{flag} {folder} {_what_it_is(folder, present)}.")
    else:
        named = tracker.read_text(encoding="utf-8", errors="replace").strip()
        is_number = named.isascii() and named.isdigit()
        wanted = named if named == "release" else f"iter_{int(named):07d}" if is_number else None
        if wanted is None:
            yield Problem(
                flag, f"{flag} {folder}: {TRACKER} says {named!r}, neither release nor a number: fix that file."
            )
        elif wanted not in present:
            yield Problem(
                flag,
                f"{flag} {folder}: {TRACKER} names {wanted}, which is not there (there is {_listed(present)}):"
                " fix that file, or copy the checkpoint again.",
            )
        else:
            yield from _damage(flag, placed(folder, wanted))


def _damage(flag: str, checkpoint: Path | None) -> Iterator[Problem]:
    if checkpoint is not None and (reason := damage(checkpoint)):
        yield Problem(
            flag, f"{flag}: {checkpoint} is not loaded, {reason}; choose another checkpoint, or copy it again."
        )


def _what_it_is(folder: Path, present: list[str]) -> str:
    if _ITERATION.fullmatch(folder.name) and (folder.parent / TRACKER).is_file():
        return f"is one iteration of a checkpoint without its {_COMPLETE}: give its parent folder {folder.parent}"
    if (folder / "config.json").is_file():
        return "is a Hugging Face model without its weights (*.safetensors): copy them too"
    if present:
        return f"holds {_listed(present)} but no {TRACKER} that names one: give the step, or write that file"
    below = sorted(path.parent.name for path in folder.glob(f"*/{TRACKER}"))
    if below:
        return f"holds no checkpoint itself, its folder {below[0]} does: give {folder / below[0]}"
    found = sorted(path.name for path in folder.iterdir())
    inside = f"{_listed(found)} and no checkpoint" if found else "nothing"
    return f"holds {inside}: give the folder that has {TRACKER}"


def _listed(names: list[str]) -> str:
    if len(names) > 4:
        return ", ".join([*names[:3], f"... {names[-1]}"])
    return ", ".join(names) or "none"


def tokenizer_fits_the_model(args: Arguments, context: Context) -> Iterator[Problem]:
    """There is a tokenizer, its files can be read, and the model has a row for each of its tokens."""
    folder = _folder(args)
    if folder is None:
        return
    tokenizer = read_tokenizer_files(folder)
    if tokenizer.fault is not None:
        yield Problem("--hf-checkpoint", f"--hf-checkpoint {folder} {tokenizer.fault}.")
    if tokenizer.tokens is None or args.vocab_size is None or args.vocab_size >= tokenizer.tokens:
        return
    if _stated_vocabulary(folder) in (None, args.vocab_size):  # else another rule names both
        yield Problem(
            "--vocab-size",
            f"--vocab-size {args.vocab_size} is less than the {tokenizer.tokens} tokens of {folder}/{tokenizer.source},"
            " whose last ids the model has no row for: give the tokenizer of this model, or a model with as many rows.",
        )


def engines_have_weights_to_load(args: Arguments, context: Context) -> Iterator[Problem]:
    """The servers that this run starts load the folder's weights before the first update."""
    folder = _folder(args)
    if folder is None or args.debug_train_only or args.rollout_external_engine_addrs:
        return
    if args.sglang_options.get("load_format") == "dummy" or args.dry_run:  # whose plan says it, with what it counts
        return
    fault = weights_fault(folder)
    if fault is not None:
        yield Problem("--hf-checkpoint", f"--hf-checkpoint {folder} {fault}.")


def _folder(args: Arguments) -> Path | None:
    """The folder, where it is one: what is wrong with it otherwise is another rule's business."""
    folder = None if args.hf_checkpoint is None else Path(args.hf_checkpoint)
    return folder if folder is not None and (folder / "config.json").is_file() else None


def _stated_vocabulary(folder: Path) -> int | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config.get("vocab_size") if isinstance(config, dict) else None
