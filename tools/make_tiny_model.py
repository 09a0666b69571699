#!/usr/bin/env python3
"""Create a tiny Qwen3 checkpoint and an arithmetic task for it.

    python tools/make_tiny_model.py --output-dir runs/tiny --seed 0

writes ``model/`` (a Hugging Face checkpoint with tokenizer and chat template, float32), ``train.jsonl`` and
``eval.jsonl`` (OpenAI messages under ``prompt``, the answer under ``label``) and ``model_args.sh`` (MODEL_ARGS for
Megatron). The model is warm-started with supervised training to solve 40 % of the eval problems; reinforcement learning
can improve it. The same seed gives the same files.

With ``--family`` the model is a toy of another family, and ``size_args.sh`` replaces ``model_args.sh``: it appends the
toy's sizes to the flags of a model of that family (``source scripts/models/moonlight.sh`` before it). A toy with a
vision tower counts the squares of pictures instead, which are data URIs under ``images``, or with ``--videos`` those of
films under ``videos``. With ``--turns`` it answers again after it was shown a half of the picture
(``examples/look_again.py``).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from slimrl.tiny.models import (
    FAMILIES,
    SIZES,
    TinySize,
    build_family_model,
    build_model,
    build_tokenizer,
    model_args_script,
    publish_config,
    publish_experts,
    save_image_processor,
    sees,
    size_args_script,
)
from slimrl.tiny.pictures import Counting, greedy_accuracy_on_pictures, split_countings, warm_start_on_pictures
from slimrl.tiny.tasks import Addition, WarmStart, greedy_accuracy, split_additions, warm_start

OWN_FILES = ("train.jsonl", "eval.jsonl", "model_args.sh", "size_args.sh")  # besides the folder "model"
SHAPE_FLAGS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "max_position_embeddings",
)


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--force", action="store_true", help="replace an older tiny model")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the split and the warm start (default 0)")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny", help="a named shape (default tiny)")
    for name in SHAPE_FLAGS:
        parser.add_argument("--" + name.replace("_", "-"), type=int, help=f"instead of {name} of --size")
    parser.add_argument("--family", choices=sorted(FAMILIES), help="a toy of this family, whose shape is fixed")
    parser.add_argument("--videos", action="store_true", help="films instead of pictures, for a family that sees")
    parser.add_argument("--turns", type=int, choices=(1, 2, 3), default=1, help="answers to a picture (default 1)")
    parser.add_argument("--untie", action="store_true", help="do not tie the output layer to the embedding")
    parser.add_argument("--train-size", type=int, default=1600, help="problems in train.jsonl (default 1600)")
    parser.add_argument("--eval-size", type=int, default=128, help="problems in eval.jsonl (default 128)")
    parser.add_argument(
        "--warm-start-steps",
        type=int,
        default=WarmStart.steps,
        help=f"supervised steps; 0 leaves the weights random (default {WarmStart.steps})",
    )
    return parser.parse_args(argv)


def size_from(args: argparse.Namespace) -> TinySize:
    """The size from the flags."""
    given = {name: vars(args)[name] for name in SHAPE_FLAGS if vars(args)[name] is not None}
    return dataclasses.replace(SIZES[args.size], tied=not args.untie, **given)


def in_the_way(folder: Path, *, force: bool) -> str | None:
    """Why `folder` cannot be written, or None."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        return f"--output-dir {folder} is a file; choose a folder"
    if not force:
        return f"--output-dir {folder} exists; remove it, choose another or add --force"
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in ("model", *OWN_FILES))
    if foreign:
        return f"--output-dir {folder} also has {foreign[0]}, which is not part of a tiny model; choose another folder"
    return None


def write_rows(path: Path, problems: list[Addition] | list[Counting], *, films: bool) -> None:
    """Writes a .jsonl file of prompts and labels."""
    rows = [problem.film_row() if films and isinstance(problem, Counting) else problem.row() for problem in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def taught_to_add(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace
) -> tuple[list[Addition], list[Addition], float]:
    """Problems of train and eval, and the model's accuracy after its warm start; raises ValueError for too many."""
    train, held_out = split_additions(seed=args.seed, train_size=args.train_size, eval_size=args.eval_size)
    warm_start(model, tokenizer, train, plan=WarmStart(steps=args.warm_start_steps), seed=args.seed)
    return train, held_out, greedy_accuracy(model, tokenizer, held_out)


def taught_to_count(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace
) -> tuple[list[Counting], list[Counting], float]:
    """The same with pictures, or films."""
    train, held_out = split_countings(seed=args.seed, train_size=args.train_size, eval_size=args.eval_size)
    with tempfile.TemporaryDirectory() as folder:
        save_image_processor(FAMILIES[args.family].config["vision_config"], Path(folder))
        model.config.save_pretrained(folder)
        plan, shown = WarmStart(steps=args.warm_start_steps), {"films": args.videos, "turns": args.turns}
        warm_start_on_pictures(model, tokenizer, train, folder, plan=plan, seed=args.seed, **shown)
        return train, held_out, greedy_accuracy_on_pictures(model, tokenizer, held_out, folder, **shown)


def main(argv: list[str]) -> int:
    """The exit code."""
    args = parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers_logging.disable_progress_bar()
    if problem := in_the_way(args.output_dir, force=args.force):
        print(problem, file=sys.stderr)
        return 2
    shaped = [name for name in SHAPE_FLAGS if vars(args)[name] is not None]
    if args.family and (shaped or args.size != "tiny"):
        flag = "--" + shaped[0].replace("_", "-") if shaped else "--size"
        print(f"{flag} has no effect on the fixed shape of --family {args.family}; give one of them", file=sys.stderr)
        return 2
    vision = args.family is not None and sees(args.family)
    if (args.videos or args.turns > 1) and not vision or (args.videos and args.turns > 1):
        print(
            "--videos and --turns need a --family with a vision tower, such as qwen2_5_vl; give one of them",
            file=sys.stderr,
        )
        return 2
    try:
        size = size_from(args)
        # One thread: the model is too small for more, and sums are then the same in every run.
        torch.set_num_threads(1)
        started = time.monotonic()
        tokenizer = build_tokenizer(max_length=size.max_position_embeddings, vision=vision)
        if args.family:
            model: PreTrainedModel = build_family_model(args.family, tokenizer, seed=args.seed, untie=args.untie)
        else:
            model = build_model(size, tokenizer, seed=args.seed)
        teach = taught_to_count if vision else taught_to_add
        train, held_out, accuracy = teach(model, tokenizer, args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2

    model_dir = args.output_dir / "model"
    if model_dir.exists():
        shutil.rmtree(model_dir)
    for name in OWN_FILES:
        (args.output_dir / name).unlink(missing_ok=True)
    model.save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)
    write_rows(args.output_dir / "train.jsonl", train, films=args.videos)
    write_rows(args.output_dir / "eval.jsonl", held_out, films=args.videos)
    if args.family:
        publish_config(args.family, model_dir)
        publish_experts(model_dir)
        save_image_processor(FAMILIES[args.family].config.get("vision_config"), model_dir)
        (args.output_dir / "size_args.sh").write_text(size_args_script(args.family, model.config))
    else:
        (args.output_dir / "model_args.sh").write_text(model_args_script(size, vocab_size=len(tokenizer)))
    print(
        f"{args.output_dir}: {args.family or 'Qwen3'} with {model.num_parameters():,} parameters, {len(train)} train"
        f" and {len(held_out)} eval problems, greedy accuracy {accuracy:.3f}, {time.monotonic() - started:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
