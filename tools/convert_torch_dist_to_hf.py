#!/usr/bin/env python3
"""Convert a torch_dist checkpoint to a Hugging Face folder.

    python tools/convert_torch_dist_to_hf.py --input-dir runs/x/iter_0000100 --output-dir model-out \
        --origin-hf-dir model-in

The origin is the Hugging Face model that training started from: its config, tokenizer and dtypes are taken over.
Runs on any machine, without a GPU and without Megatron.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

from tqdm import tqdm

from slimrl.weights.convert import torch_dist_to_hf


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags of this tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-dir", type=Path, required=True, help="the checkpoint's iter_xxxxxxx or release folder")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--origin-hf-dir", type=Path, required=True, help="the Hugging Face model it began as")
    parser.add_argument("--vocab-size", type=int, help="rows of the embedding to keep (default: as the origin)")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing output folder")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Converts; returns the exit code."""
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        torch_dist_to_hf(
            args.input_dir,
            args.output_dir,
            args.origin_hf_dir,
            vocab_size=args.vocab_size,
            force=args.force,
            progress=functools.partial(tqdm, desc="converting", unit="tensor", disable=None),
        )
    except (FileExistsError, FileNotFoundError, ValueError) as error:
        hint = " (or --force)" if isinstance(error, FileExistsError) else ""
        print(f"{Path(__file__).name}: {error}{hint}; nothing was written.", file=sys.stderr)
        return 2
    print(f"wrote {args.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
