#!/usr/bin/env python3
"""Convert a Hugging Face model to a torch_dist checkpoint, which training loads in any parallel layout.

    source scripts/models/qwen3-4B.sh
    python tools/convert_hf_to_torch_dist.py ${MODEL_ARGS[@]} --hf-checkpoint model-in --save model_torch_dist

The model flags must describe the model in config.json. Weights keep their dtype unless --bf16 or --fp16 is
given. --force replaces an existing output. Runs in one process, with or without a GPU.
"""

from __future__ import annotations

import functools
import importlib.metadata
import shutil
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from slimrl.arguments import Arguments, parse_args
from slimrl.weights.families import family_for
from slimrl.weights.hf_files import HfCheckpoint, read_hf_config
from slimrl.weights.load import check_checkpoint, load_hf_checkpoint
from slimrl.weights.shape import ModelShape

if TYPE_CHECKING:
    from slimrl.weights.families import Family

NAME = Path(__file__).name
# the checkpoint does not depend on the layout that wrote it, so one process with one device does
LAYOUT_FLAGS = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
)
PIPELINE_FLAGS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")


def without_layout(argv: list[str]) -> list[str]:
    """The command line for a layout of one process; says so where another was asked for."""
    given = [flag for flag in (*LAYOUT_FLAGS, *PIPELINE_FLAGS) if any(word.split("=")[0] == flag for word in argv)]
    if given:
        print(f"{NAME}: {', '.join(given)} ignored: the checkpoint is the same for every parallel layout.")
    kept, words = [], iter(argv)
    for word in words:
        if word in PIPELINE_FLAGS:
            next(words, None)
        elif word.split("=")[0] not in PIPELINE_FLAGS:
            kept.append(word)
    return kept + [word for flag in LAYOUT_FLAGS for word in (flag, "1")]


def leave_out_megatron_checkouts() -> None:
    """Takes folders that shadow the installed megatron-core (a Megatron-LM checkout on PYTHONPATH) off sys.path."""
    installed = Path(str(importlib.metadata.distribution("megatron-core").locate_file(""))).resolve()
    shadowing = [
        path for path in sys.path if Path(path).resolve() != installed and (Path(path) / "megatron" / "core").is_dir()
    ]
    for path in shadowing:
        print(f"{NAME}: {path} on the import path is left out: slimrl uses the installed megatron-core.")
    sys.path[:] = [path for path in sys.path if path not in shadowing]


def read_flags(argv: list[str]) -> tuple[Arguments, bool]:
    """The flags for one process, and whether --force was given. Exits with code 2 on any problem."""
    force = "--force" in argv
    flags = without_layout([word for word in argv if word != "--force"])
    args = parse_args(flags, entry=NAME)
    for flag, value in (("--hf-checkpoint", args.hf_checkpoint), ("--save", args.save)):
        if value is None:
            raise ValueError(
                f"{flag} is missing: it names the {'model to read' if 'hf' in flag else 'folder to write'}"
            )
    return args, force


def keep_dtype(args: Arguments, family: Family) -> None:
    """Without --bf16 and --fp16, stores the weights as the Hugging Face checkpoint does."""
    with HfCheckpoint(Path(args.hf_checkpoint)) as checkpoint:
        stored = checkpoint.dtype(family.embedding.hf[0].name)
    if not args.bf16 and not args.fp16:
        args.bf16, args.fp16 = stored is torch.bfloat16, stored is torch.float16
    elif stored is torch.float32 or args.bf16 != (stored is torch.bfloat16):
        print(f"{NAME}: weights stored as {stored} are rounded to {'bfloat16' if args.bf16 else 'float16'}.")


def convert(args: Arguments, *, force: bool) -> Path:
    """Writes the checkpoint and returns its folder, or raises FileExistsError, FileNotFoundError or ValueError."""
    hf_dir, target = Path(args.hf_checkpoint), Path(args.save)
    if target.exists() and not force:
        raise FileExistsError(f"--save {target} exists already: choose another folder, remove it or add --force")
    family, shape = family_for(read_hf_config(hf_dir)), ModelShape.from_args(args)
    with HfCheckpoint(hf_dir) as checkpoint:
        check_checkpoint(checkpoint, shape, family)
    keep_dtype(args, family)
    leave_out_megatron_checkouts()
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # on kernels that converting needs not
    from slimrl.megatron import checkpoint as megatron_checkpoint
    from slimrl.megatron import model as megatron_model
    from slimrl.megatron import parallel

    progress = functools.partial(tqdm, desc="converting", unit="tensor", disable=None)
    partial = target.absolute().with_name(f".{target.absolute().name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what an earlier, killed run left
    state = parallel.initialize(args, rank=0, world_size=1, init_method="tcp://127.0.0.1:0")
    try:
        model = megatron_model.build_model(args, state)
        load_hf_checkpoint(model, shape, family, hf_dir, progress=progress)
        written = megatron_checkpoint.save_model_only(model, partial)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        parallel.shutdown()
    return target / written.name


def main(argv: list[str] | None = None) -> int:
    """Converts; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    try:
        args, force = read_flags(argv)
        folder = convert(args, force=force)
    except (FileExistsError, FileNotFoundError, ValueError) as error:
        print(f"{NAME}: {error}; nothing was written.", file=sys.stderr)
        return 2
    print(f"wrote {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
