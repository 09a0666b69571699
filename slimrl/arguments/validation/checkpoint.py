"""Rules about torch_dist checkpoints, and about the tokenizer and weights in the folder of --hf-checkpoint.

A checkpoint folder has `latest_checkpointed_iteration.txt`, which names `release` or an iteration, and the folder
`release` or `iter_<7 digits>` that it names. The path of such an inner folder is accepted too, and so is the folder of
a Hugging Face model, which has weights but no state to resume. A wrong path is an error and not a fresh start; a
damaged checkpoint is reported before any process starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimrl.arguments.checkpoints import (
    CRITIC,
    REPLACED,
    SIZES,
    find,
    find_corruption,
    folder_name,
    is_hf_model,
    placed,
    read_manifest,
)
from slimrl.arguments.checkpoints import TRACKER_NAME as TRACKER
from slimrl.arguments.flag import Problem
from slimrl.arguments.hf_config import disagreements
from slimrl.arguments.namespace import Arguments, Context, absent
from slimrl.models.hf_folder import read_tokenizer_files, weights_fault

_COMPLETE = "metadata.json"  # exists in the folder of every complete iteration
_ITERATION = re.compile(r"iter_(\d{7})|release")
_ROLLOUT = "{rollout_id}"


def weights_have_a_source(args: Arguments, context: Context) -> Iterator[Problem]:
    """Weights come from --load, or for a fresh start from --ref-load; a KL always needs --ref-load."""
    if args.debug_rollout_only or "ref_load" in context.broken:
        return
    if args.ref_load is None and args.use_reference and not args.eval_only:
        cause = f"--kl-coef {args.kl_coef:g}" if args.kl_coef != 0 else "--use-kl-loss"
        cause = f"--preference-loss {args.preference_loss}" if args.trains_on_pairs else cause
        yield Problem(
            "--ref-load", f"{cause} compares with a reference model and --ref-load is missing: give its checkpoint."
        )
    elif args.ref_load is not None:
        return
    elif args.load is None:
        yield Problem("--ref-load", "there are no weights to start from: give --ref-load (or --load to resume).")
    elif is_fresh(Path(args.load)):
        yield Problem(
            "--load", f"--load {args.load} has no checkpoint yet and --ref-load is missing: give the initial weights."
        )


def ref_load_is_a_checkpoint(args: Arguments, context: Context) -> Iterator[Problem]:
    """--ref-load is a valid checkpoint."""
    if args.ref_load is not None and not args.debug_rollout_only:
        folder = Path(args.ref_load)
        if not folder.is_dir():
            yield Problem(
                "--ref-load",
                f"--ref-load {folder} {absent(folder)}: make it with tools/convert_hf_to_torch_dist.py, or give the"
                " Hugging Face folder itself.",
            )
        else:
            yield from checkpoint_problems("--ref-load", folder, "--ref-ckpt-step", args.ref_ckpt_step)


def load_is_a_checkpoint_or_new(args: Arguments, context: Context) -> Iterator[Problem]:
    """--load is a checkpoint, or for a fresh start an empty folder or an absent one that is also --save."""
    if args.debug_rollout_only or args.load is None:
        if args.ckpt_step is not None and args.load is None:
            yield Problem("--ckpt-step", f"--ckpt-step {args.ckpt_step} needs --load: add it, or leave the step out.")
        return
    folder = Path(args.load)
    if folder.exists() and not folder.is_dir():
        yield Problem("--load", f"--load {folder} is a file: give the checkpoint's folder.")
    elif not is_fresh(folder):
        yield from checkpoint_problems("--load", folder, "--ckpt-step", args.ckpt_step)
    elif args.ckpt_step is not None:
        yield Problem(
            "--ckpt-step",
            f"--ckpt-step {args.ckpt_step} is not in --load {folder}, which has no checkpoint: leave it out.",
        )
    elif not folder.exists() and not _saves_to(folder, args):
        yield Problem(
            "--load",
            f"--load {folder} {absent(folder)}, and it is not the --save folder: fix the path, or create the folder"
            " for a fresh start.",
        )


def loaded_models_have_the_head(args: Arguments, context: Context) -> Iterator[Problem]:
    """A reward model is continued as one; policy, reference and teacher are language models.

    Checkpoints of slimrl say which they are in their manifest, Hugging Face folders in the `architectures` of
    config.json.
    """
    if context.broken:
        return
    teacher = args.opd_teacher_load if args.has_megatron_teacher else None
    for flag, value, step in (
        ("--load", args.load, args.ckpt_step),
        ("--ref-load", args.ref_load, args.ref_ckpt_step),
        ("--opd-teacher-load", teacher, args.opd_teacher_ckpt_step),
        ("--hf-checkpoint", args.hf_checkpoint, None),
    ):
        if value is None or (args.debug_rollout_only and flag != "--hf-checkpoint") or not Path(value).is_dir():
            continue
        has_value_head, what = _head(Path(value), step)
        if has_value_head is True and not args.trains_reward_model:
            yield Problem(
                flag,
                f"{flag} {value} is {what}, which has no output layer to sample tokens: give that of a policy;"
                " --critic-load and --rm-model take a reward model.",
            )
        if has_value_head is False and args.trains_reward_model and not args.finetune and flag == "--load":
            yield Problem(
                "--load",
                f"--load {value} is the checkpoint of a policy, which has no reward head to continue with: give it as"
                " --ref-load, or add --finetune, which starts a reward model from its weights.",
            )


def _head(folder: Path, step: int | None) -> tuple[bool | None, str]:
    """Whether the model has a value head instead of an output layer (None: not said), and what it is, in words."""
    if (folder / "config.json").is_file():
        config = _config(folder)
        names = [name for name in config.get("architectures") or () if re.search("Classification|RewardModel", name)]
        return (True, f"a {names[0]} (architectures in its config.json)") if names else (None, "")
    return (_manifest(folder, step).get("value_head"), "the checkpoint of a critic or a reward model")


def _manifest(folder: Path, step: int | None) -> dict[str, Any]:
    """The manifest of the checkpoint that is loaded from `folder`; empty without one."""
    try:
        found = find(str(folder), step)
    except ValueError:  # another rule reports it
        return {}
    return (read_manifest(found.folder) if found is not None else None) or {}


def _saves_to(folder: Path, args: Arguments) -> bool:
    """True if --save is `folder`, or missing although needed (another rule reports that)."""
    return args.save_interval is not None if args.save is None else folder.absolute() == Path(args.save).absolute()


def saving_is_complete(args: Arguments, context: Context) -> Iterator[Problem]:
    """Flags of saving need --save."""
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
            yield Problem("--save", f"{flag}{shown} needs --save: give a folder.")


def retention_fits_saving(args: Arguments, context: Context) -> Iterator[Problem]:
    """Every checkpoint to keep is saved, and the reference model is not deleted."""
    kept, every = args.save_retain_interval, args.save_interval
    if kept is not None and every is not None and kept % every != 0:
        yield Problem(
            "--save-retain-interval",
            f"--save-retain-interval {kept} is not a multiple of --save-interval {every}: some checkpoints to keep"
            f" would not be written; give {kept - kept % every + every}.",
        )
    deletes = kept is not None or args.save_total_limit is not None
    if deletes and args.save is not None and args.ref_load is not None:
        folder, root = Path(args.ref_load).absolute(), Path(args.save).absolute()
        if root in (folder, folder.parent):
            yield Problem(
                "--ref-load",
                f"--ref-load {args.ref_load} is in --save {args.save}, where --save-total-limit and"
                " --save-retain-interval delete: copy the reference to another folder.",
            )


def exports_have_a_place(args: Arguments, context: Context) -> Iterator[Problem]:
    """--save-hf gives each rollout its own folder, and --hf-checkpoint has weights to model it on."""
    if args.save_hf is None or "save_hf" in context.broken:
        return
    if _ROLLOUT not in args.save_hf or set("{}") & set(args.save_hf.replace(_ROLLOUT, "")):
        yield Problem(
            "--save-hf",
            f"--save-hf {args.save_hf} must contain {_ROLLOUT} and no other braces: put {_ROLLOUT} into the path.",
        )
    elif args.save is not None and _ITERATION.fullmatch(Path(args.save_hf).name.replace(_ROLLOUT, "0000000")):
        yield Problem(
            "--save-hf", f"--save-hf {args.save_hf} has the name of a training checkpoint: choose another name."
        )
    if args.lora_rank is not None and not args.lora_merge:
        return  # PEFT folders have the adapters alone
    if args.hf_checkpoint is not None and not any(Path(args.hf_checkpoint).glob("*.safetensors")):
        yield Problem(
            "--save-hf",
            f"--save-hf is modelled on --hf-checkpoint {args.hf_checkpoint}, which has no weights (*.safetensors): copy"
            " them too, or convert checkpoints with tools/convert_torch_dist_to_hf.py.",
        )


def hf_models_agree(args: Arguments, context: Context) -> Iterator[Problem]:
    """Hugging Face folders given as --load or --ref-load agree with the model flags."""
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


def checkpoints_have_the_sizes_of_the_model(args: Arguments, context: Context) -> Iterator[Problem]:
    """Checkpoints of slimrl say the sizes of their model, which are those of the model flags."""
    if args.debug_rollout_only or context.broken:
        return
    of_critic = args.critic_load if args.use_critic else None
    of_teacher = args.opd_teacher_load if args.has_megatron_teacher else None
    for flag, value, step in (
        ("--load", args.load, args.ckpt_step),
        ("--ref-load", args.ref_load, args.ref_ckpt_step),
        ("--critic-load", of_critic, None),
        ("--opd-teacher-load", of_teacher, args.opd_teacher_ckpt_step),
    ):
        if value is None or not Path(value).is_dir() or is_hf_model(Path(value)):
            continue
        sizes = _manifest(Path(value), step).get("sizes", {})
        flags = vars(args)
        differ = [
            f"--{name.replace('_', '-')} {flags[name]} is {sizes[name]} there"
            for name in SIZES
            if name in sizes and flags[name] not in (None, sizes[name])
        ]
        if differ:
            yield Problem(
                flag, f"{flag} {value} is a checkpoint of another model ({', '.join(differ)}): give another folder."
            )


def saved_apart_from_a_model(args: Arguments, context: Context) -> Iterator[Problem]:
    """Checkpoints are not written among the files of a Hugging Face model."""
    if args.save is not None and is_hf_model(Path(args.save)):
        yield Problem("--save", f"--save {args.save} is a Hugging Face model: give another folder.")


def is_fresh(folder: Path) -> bool:
    """True if the folder has no checkpoint: it is absent, or has only hidden and unfinished files, and the critic's."""
    if not folder.exists():
        return True
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else [""]
    return all(name.startswith(".") or name.endswith(".tmp") or name == CRITIC for name in names)


def checkpoint_problems(flag: str, folder: Path, step_flag: str, step: int | None) -> Iterator[Problem]:
    """What is wrong with the existing `folder` of `flag`, from which iteration `step` (None: the newest) is loaded."""
    if (folder / _COMPLETE).is_file():
        if step is not None and folder.name != f"iter_{step:07d}":
            yield Problem(
                step_flag, f"{step_flag} {step} selects an iteration and {flag} {folder} is one: leave the step out."
            )
        else:
            yield from _damage(flag, folder)
        return  # one iteration by its own path
    if is_hf_model(folder):
        if step is not None:
            yield Problem(
                step_flag,
                f"{step_flag} {step} selects an iteration and {flag} {folder} is a Hugging Face model: leave the step"
                " out.",
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
                step_flag, f"{step_flag} {step} is not in {flag} {folder}, which has {_listed(present)}: choose one."
            )
    elif not tracker.is_file():
        yield Problem(flag, f"{flag} {folder} {_what_it_is(folder, present)}.")
    else:
        named = tracker.read_text(encoding="utf-8", errors="replace").strip()
        is_number = named.isascii() and named.isdigit()
        wanted = named if named == "release" else f"iter_{int(named):07d}" if is_number else None
        if wanted is None:
            yield Problem(
                flag, f"{flag} {folder}: {TRACKER} contains {named!r}, neither release nor a number: fix that file."
            )
        elif wanted not in present:
            yield Problem(
                flag,
                f"{flag} {folder}: {TRACKER} names {wanted}, which does not exist (the folder has {_listed(present)}):"
                " fix that file, or copy the checkpoint again.",
            )
        else:
            yield from _damage(flag, placed(folder, wanted))


def _damage(flag: str, checkpoint: Path | None) -> Iterator[Problem]:
    if checkpoint is not None and (reason := find_corruption(checkpoint)):
        yield Problem(
            flag, f"{flag}: {checkpoint} is not loaded, {reason}; choose another checkpoint, or copy it again."
        )


def _what_it_is(folder: Path, present: list[str]) -> str:
    if _ITERATION.fullmatch(folder.name) and (folder.parent / TRACKER).is_file():
        return f"is one iteration of a checkpoint without its {_COMPLETE}: give its parent folder {folder.parent}"
    if (folder / "config.json").is_file():
        return "is a Hugging Face model without its weights (*.safetensors): copy them too"
    if present:
        return f"has {_listed(present)} but no {TRACKER}: give the step, or write that file"
    below = sorted(path.parent.name for path in folder.glob(f"*/{TRACKER}"))
    if below:
        return f"has no checkpoint, its subfolder {below[0]} has: give {folder / below[0]}"
    found = sorted(path.name for path in folder.iterdir())
    inside = f"has {_listed(found)} and no checkpoint" if found else "is empty"
    return f"{inside}: give the folder that has {TRACKER}"


def _listed(names: list[str]) -> str:
    if len(names) > 4:
        return ", ".join([*names[:3], f"... {names[-1]}"])
    return ", ".join(names) or "none"


def tokenizer_fits_the_model(args: Arguments, context: Context) -> Iterator[Problem]:
    """The tokenizer's files can be read, and the model has an embedding row for each of its tokens."""
    folder = _folder(args)
    if folder is None:
        return
    tokenizer = read_tokenizer_files(folder)
    if tokenizer.fault is not None:
        yield Problem("--hf-checkpoint", f"--hf-checkpoint {folder} {tokenizer.fault}.")
    if tokenizer.tokens is None or args.vocab_size is None or args.vocab_size >= tokenizer.tokens:
        return
    if _config(folder).get("vocab_size") in (None, args.vocab_size):  # else another rule reports it
        yield Problem(
            "--vocab-size",
            f"--vocab-size {args.vocab_size} is less than the {tokenizer.tokens} tokens of {folder}/{tokenizer.source},"
            " and the model has no rows for the last ids: use the tokenizer of this model, or a model with more rows.",
        )


def engines_have_weights_to_load(args: Arguments, context: Context) -> Iterator[Problem]:
    """The servers that this run starts load the folder's weights before the first update."""
    folder = _folder(args)
    if folder is None or args.debug_train_only or args.rollout_external_engine_addrs:
        return
    if args.sglang_options.get("load_format") == "dummy" or args.dry_run:  # the plan itself reports missing weights
        return
    fault = weights_fault(folder)
    if fault is not None:
        yield Problem("--hf-checkpoint", f"--hf-checkpoint {folder} {fault}.")


def _folder(args: Arguments) -> Path | None:
    """--hf-checkpoint if it has a config.json; another rule reports other problems."""
    folder = None if args.hf_checkpoint is None else Path(args.hf_checkpoint)
    return folder if folder is not None and (folder / "config.json").is_file() else None


def _config(folder: Path) -> dict[str, Any]:
    """The content of config.json; empty if it is not readable, which another rule reports."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def hf_checkpoint_exists(args: Arguments, context: Context) -> Iterator[Problem]:
    """--hf-checkpoint is a folder with config.json."""
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
            f"--hf-checkpoint {folder} has no config.json: give the folder with the model's files.",
        )
