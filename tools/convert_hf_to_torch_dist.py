#!/usr/bin/env python3
"""Convert a Hugging Face model to a torch_dist checkpoint, which training loads in any parallel layout.

    source scripts/models/qwen3-4B.sh
    python tools/convert_hf_to_torch_dist.py ${MODEL_ARGS[@]} --hf-checkpoint model-in --save model_torch_dist

The model flags must describe the model in config.json. --hf-checkpoint is a folder or a model id (org/name), which
is downloaded. Weights keep their dtype unless --bf16 or --fp16 is given. -f or --force replaces an older output, but
not a folder with other files.
Runs on any machine, with or without a GPU; the whole model is never in memory. Several processes started by torchrun
share the work:

    torchrun --nproc-per-node 4 tools/convert_hf_to_torch_dist.py ...
    torchrun --nnodes 2 --node-rank $RANK --master-addr $MASTER_ADDR --nproc-per-node 4 tools/...   # two hosts
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slimrl.arguments import Arguments, parse_args
from slimrl.models.families import family_for
from slimrl.models.model_spec import ModelSpec
from slimrl.observability.terminal import ByteBar
from slimrl.platform.collective_errors import ConversionGroup
from slimrl.weights.convert.hf_to_megatron import hf_to_torch_dist
from slimrl.weights.hf_checkpoint import HfCheckpoint, local_hf_folder, read_hf_config

if TYPE_CHECKING:
    from slimrl.models.families import ModelMapping

NAME = Path(__file__).name
FORCE = ("-f", "--force")
HF_CHECKPOINT = "--hf-checkpoint"
# the checkpoint does not depend on the parallel layout, so these flags are dropped, with their values
LAYOUT_FLAGS = (
    "--tensor-model-parallel-size",
    "--sequence-parallel",
    "--pipeline-model-parallel-size",
    "--pipeline-model-parallel-layout",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--microbatch-group-size-per-vp-stage",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--context-parallel-size",
    "--cp-comm-type",
    "--hierarchical-context-parallel-sizes",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
)


def without_layout(argv: list[str]) -> list[str]:
    """The command line without parallel layout flags; prints a note if there were any."""
    kept: list[str] = []
    given: list[str] = []
    dropping = False
    for word in argv:
        if word.startswith("--"):
            dropping = word.split("=")[0] in LAYOUT_FLAGS
            given += [word.split("=")[0]] if dropping else []
        if not dropping:
            kept.append(word)
    if given:
        print(f"{NAME}: {', '.join(given)} ignored: the checkpoint is the same for every parallel layout.")
    return kept


def with_local_model(argv: list[str]) -> list[str]:
    """The command line with a model id replaced by the folder of the model."""
    words = list(argv)
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag != HF_CHECKPOINT:
            continue
        if equals:
            words[place] = f"{HF_CHECKPOINT}={local_hf_folder(HF_CHECKPOINT, value)}"
        elif place + 1 < len(words):
            words[place + 1] = str(local_hf_folder(HF_CHECKPOINT, words[place + 1]))
    return words


def leave_out_megatron_checkouts() -> None:
    """Removes folders that shadow the installed megatron-core (a Megatron-LM checkout on PYTHONPATH) from sys.path."""
    installed = Path(str(importlib.metadata.distribution("megatron-core").locate_file(""))).resolve()
    shadowing = [
        path for path in sys.path if Path(path).resolve() != installed and (Path(path) / "megatron" / "core").is_dir()
    ]
    for path in shadowing:
        print(f"{NAME}: ignoring {path} on the import path: slimrl uses the installed megatron-core.")
    sys.path[:] = [path for path in sys.path if path not in shadowing]


def read_flags(argv: list[str]) -> tuple[Arguments, bool]:
    """The flags for one process, and whether --force was given. Exits with code 2 on any problem."""
    force = any(word in FORCE for word in argv)
    flags = without_layout([word for word in argv if word not in FORCE])
    args = parse_args(with_local_model(flags), entry=NAME)
    for flag, value in ((HF_CHECKPOINT, args.hf_checkpoint), ("--save", args.save)):
        if value is None:
            raise ValueError(
                f"{flag} is missing: it names the {'model to read' if 'hf' in flag else 'folder to write'}"
            )
    return args, force


def keep_dtype(args: Arguments, family: ModelMapping) -> None:
    """Without --bf16 and --fp16, stores the weights in the dtype of the Hugging Face checkpoint."""
    with HfCheckpoint(Path(args.hf_checkpoint)) as checkpoint:
        stored = checkpoint.dtype(family.embedding.hf[0].name)
    if not args.bf16 and not args.fp16:
        args.bf16, args.fp16 = stored is torch.bfloat16, stored is torch.float16
    elif stored is torch.float32 or args.bf16 != (stored is torch.bfloat16):
        print(f"{NAME}: weights stored as {stored} are rounded to {'bfloat16' if args.bf16 else 'float16'}.")


def convert(args: Arguments, group: ConversionGroup, *, force: bool) -> Path:
    """Writes the checkpoint and returns its folder; raises as `hf_to_torch_dist`."""
    hf_dir = Path(args.hf_checkpoint)
    family = family_for(read_hf_config(hf_dir))
    keep_dtype(args, family)
    leave_out_megatron_checkouts()
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # about kernels that are not needed
    from slimrl.megatron.checkpoint.state import model_blueprint

    assert args.save is not None
    with ByteBar("converting", shown=group.is_rank_zero) as bar:
        return hf_to_torch_dist(
            hf_dir,
            Path(args.save),
            ModelSpec.from_args(args),
            family,
            lambda folder: model_blueprint(args, folder),
            force=force,
            group=group,
            on_start=bar.start,
        )


def main(argv: list[str] | None = None) -> int:
    """Converts; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    try:
        args, force = read_flags(argv)
        group = ConversionGroup.from_environment(os.environ)
        folder = convert(args, group, force=force)
    except (OSError, ValueError, RuntimeError) as error:
        hint = ", or add --force to replace it" if isinstance(error, FileExistsError) else ""
        print(f"{NAME}: {error}{hint}; nothing was written.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{NAME}: interrupted; nothing was written.", file=sys.stderr)
        return 130
    if group.is_rank_zero:
        print(f"wrote {folder}")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # the converter's own threads share the work; torch's threads would compete with them
    sys.exit(main())
