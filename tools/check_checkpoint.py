#!/usr/bin/env python3
"""Compare a torch_dist checkpoint with a Hugging Face folder: names, shapes, dtypes and the largest difference.

    python tools/check_checkpoint.py --input-dir model_torch_dist --hf-checkpoint model

Prints the tensors that differ most and a verdict. Ends with 0 where both hold the same model, 1 where they differ,
2 where a folder cannot be read. The model is never in memory as a whole.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch

from slimrl.weights.compare import Comparison, TensorPair, compare_checkpoints
from slimrl.weights.hub import local_hf_folder
from slimrl.weights.names import listed
from slimrl.weights.progress import ByteBar
from slimrl.weights.torch_dist import resolve_checkpoint

NAME = Path(__file__).name
EQUAL, DIFFERENT, BAD_INPUT = 0, 1, 2


def not_negative(text: str) -> float:
    """A number of at least 0."""
    value = float(text)
    if not value >= 0:
        raise ValueError(text)
    return value


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags of this tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--input-dir",
        type=Path,
        required=True,
        help="the checkpoint's iter_xxxxxxx or release folder, or the one above it, whose newest checkpoint is taken",
    )
    parser.add_argument("--hf-checkpoint", required=True, help="Hugging Face folder or model id (org/name)")
    parser.add_argument(
        "--tolerance", type=not_negative, default=0.0, help="largest difference that counts as equal (default: 0)"
    )
    parser.add_argument("--worst", type=int, default=10, help="tensors to print, those that differ most (default: 10)")
    return parser.parse_args(argv)


def line(pair: TensorPair) -> str:
    """One row of the table."""
    shapes = " x ".join(map(str, pair.hf_shape))
    if pair.stored_shape != pair.hf_shape:
        shapes = f"{' x '.join(map(str, pair.stored_shape))} / {shapes}"
    dtypes = str(pair.hf_dtype).removeprefix("torch.")
    if pair.stored_dtype != pair.hf_dtype:
        dtypes = f"{str(pair.stored_dtype).removeprefix('torch.')} / {dtypes}"
    difference = "shape" if pair.max_difference is None else f"{pair.max_difference:.3g}"
    return f"{difference:>11}  {dtypes:<20}  {shapes:<22}  {pair.name}"


def report(found: Comparison, tolerance: float, worst: int) -> str:
    """The table and the verdict; where the two sides differ, the torch_dist side stands first."""
    lines = [f"{'difference':>11}  {'dtype':<20}  {'shape':<22}  tensor"]
    lines += [line(pair) for pair in found.worst()[:worst]]
    if found.not_converted:
        lines.append(f"not compared, kept in Hugging Face folders only: {listed(found.not_converted)}")
    for names, where in ((found.only_stored, "torch_dist"), (found.only_hf, "Hugging Face")):
        if names:
            lines.append(f"only in the {where} checkpoint: {listed(names)}")
    elements = sum(math.prod(pair.hf_shape) for pair in found.pairs)
    differing = sum(not pair.is_equal(tolerance) for pair in found.pairs)
    if found.is_equal(tolerance):
        within = f" within {tolerance:g}" if tolerance else ""
        lines.append(f"EQUAL{within}: {len(found.pairs)} tensors, {elements:,} elements")
    else:
        one_sided = len(found.only_stored) + len(found.only_hf)
        lines.append(f"DIFFERENT: {differing} of {len(found.pairs)} tensors differ, {one_sided} are on one side only")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Compares; returns the exit code."""
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        with ByteBar("comparing") as bar:
            folder = local_hf_folder("--hf-checkpoint", args.hf_checkpoint)
            found = compare_checkpoints(resolve_checkpoint(args.input_dir), folder, bar.start)
    except (OSError, ValueError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return BAD_INPUT
    print(report(found, args.tolerance, args.worst))
    return EQUAL if found.is_equal(args.tolerance) else DIFFERENT


if __name__ == "__main__":
    torch.set_num_threads(1)  # comparing waits for the disk, not for a processor
    sys.exit(main())
