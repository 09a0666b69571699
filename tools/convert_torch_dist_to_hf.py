#!/usr/bin/env python3
"""Convert a torch_dist checkpoint to a Hugging Face folder.

    python tools/convert_torch_dist_to_hf.py --input-dir runs/x/iter_0000100 --output-dir model-out \
        --origin-hf-dir model-in

The origin is the Hugging Face model that training started from (a folder, or a model id, which is downloaded): the
output has its config, tokenizer and dtypes. Runs on any machine, without a GPU and without Megatron; the whole model is
never in memory. Several processes started by torchrun share the files to write:

    torchrun --nproc-per-node 4 tools/convert_torch_dist_to_hf.py ...
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from slimrl.observability.terminal import ByteBar
from slimrl.platform.collective_errors import ConversionGroup
from slimrl.weights.convert.megatron_to_hf import torch_dist_to_hf
from slimrl.weights.convert.torch_dist_reader import resolve_checkpoint
from slimrl.weights.hf_checkpoint import local_hf_folder
from slimrl.weights.hf_checkpoint_writer import MAX_SHARD_BYTES

NAME = Path(__file__).name


def byte_count(text: str) -> int:
    """A number of bytes of at least 1."""
    count = int(text)
    if count < 1:
        raise ValueError(text)
    return count


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags of this tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--input-dir",
        type=Path,
        required=True,
        help="the checkpoint's iter_xxxxxxx or release folder, or its parent, whose newest checkpoint is used",
    )
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write; must not exist or be empty")
    parser.add_argument(
        "--origin-hf-dir", required=True, help="the original Hugging Face model: a folder or a model id (org/name)"
    )
    parser.add_argument(
        "--model-name", help="model family, for example qwen3_moe (default: model_type in the origin's config.json)"
    )
    parser.add_argument("--vocab-size", type=int, help="rows of the embedding to keep (default: as the origin)")
    parser.add_argument(
        "--chunk-size",
        type=byte_count,
        default=MAX_SHARD_BYTES,
        help="maximum bytes of tensors in one safetensors file (default: %(default)s, 5 GiB)",
    )
    parser.add_argument(
        "-a",
        "--add-missing-from-origin-hf",
        action="store_true",
        help="copy tensors that the checkpoint lacks from the origin (default: an error)",
    )
    parser.add_argument(
        "-f",
        "--force",
        action="store_true",
        help="replace an older output; a folder with other files is an error",
    )
    return parser.parse_args(argv)


def convert(args: argparse.Namespace, group: ConversionGroup) -> None:
    """Writes the folder; raises as `torch_dist_to_hf`."""
    with ByteBar("converting", shown=group.is_rank_zero) as bar:
        torch_dist_to_hf(
            resolve_checkpoint(args.input_dir),
            args.output_dir,
            local_hf_folder("--origin-hf-dir", args.origin_hf_dir),
            vocab_size=args.vocab_size,
            model_name=args.model_name,
            add_missing=args.add_missing_from_origin_hf,
            force=args.force,
            max_shard_bytes=args.chunk_size,
            group=group,
            on_start=bar.start,
        )


def main(argv: list[str] | None = None) -> int:
    """Converts; returns the exit code."""
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        group = ConversionGroup.from_environment(os.environ)
        convert(args, group)
    except (OSError, ValueError, RuntimeError) as error:
        hint = ", or add --force to replace it" if isinstance(error, FileExistsError) else ""
        print(f"{NAME}: {error}{hint}; nothing was written.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{NAME}: interrupted; nothing was written.", file=sys.stderr)
        return 130
    if group.is_rank_zero:
        print(f"wrote {args.output_dir}")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # the converter's own threads share the work; torch's threads would compete with them
    sys.exit(main())
