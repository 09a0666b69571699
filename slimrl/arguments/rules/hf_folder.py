"""Rules about the folder of --hf-checkpoint beside its config.json: the tokenizer and the weights that engines load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from slimrl.arguments.hf_folder import read_tokenizer_files, weights_fault
from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context


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
