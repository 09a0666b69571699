#!/usr/bin/env python3
"""Check that a torch_dist checkpoint has the bytes that were written, and compare it with a Hugging Face folder.

    python tools/check_checkpoint.py --input-dir model_torch_dist
    python tools/check_checkpoint.py --input-dir model_torch_dist --hf-checkpoint model

The first compares every file with the checkpoint's checksums. The second also compares names, shapes, dtypes and
values, and prints the tensors that differ most. Exit code 0 if all is well, 1 if the models differ, 2 if a folder
cannot be read or is damaged. The whole model is never in memory.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch

from slimrl.observability.terminal import ByteBar
from slimrl.processes.files import listed
from slimrl.weights.convert.compare_checkpoints import Comparison, TensorPair, compare_checkpoints
from slimrl.weights.convert.torch_dist_reader import TorchDistCheckpoint, resolve_checkpoint
from slimrl.weights.hf_checkpoint import local_hf_folder

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
        help="the checkpoint's iter_xxxxxxx or release folder, or its parent, whose newest checkpoint is used",
    )
    parser.add_argument("--hf-checkpoint", help="Hugging Face folder or model id (org/name) to compare with")
    parser.add_argument(
        "--tolerance", type=not_negative, default=0.0, help="largest difference that counts as equal (default: 0)"
    )
    parser.add_argument("--worst", type=int, default=10, help="how many of the most different tensors to print")
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
    """The table and the result; if the two sides differ, the torch_dist side is first."""
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


def verify(folder: Path, *, alone: bool) -> str:
    """Verifies the checksum of every file; returns the line to print.

    Raises ValueError for a damaged file, and if there are no checksums and no other check was requested (`alone`).
    """
    checked = TorchDistCheckpoint(folder).checked
    if checked is not None:
        return (
            f"WHOLE: the bytes of {len(checked.names)} files, {checked.check():,} in all, are those that were written"
        )
    text = f"{folder} has no checksums: whether its bytes are those that were written is not known"
    if alone:
        raise ValueError(f"{text}; give --hf-checkpoint to compare its weights")
    return text


def main(argv: list[str] | None = None) -> int:
    """Compares; returns the exit code."""
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        # The model's folder first: a missing one is reported before gigabytes are read.
        folder = None if args.hf_checkpoint is None else local_hf_folder("--hf-checkpoint", args.hf_checkpoint)
        checkpoint = resolve_checkpoint(args.input_dir)
        print(verify(checkpoint, alone=folder is None))
        if folder is None:
            return EQUAL
        with ByteBar("comparing") as bar:
            found = compare_checkpoints(checkpoint, folder, bar.start)
    except (OSError, ValueError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return BAD_INPUT
    print(report(found, args.tolerance, args.worst))
    return EQUAL if found.is_equal(args.tolerance) else DIFFERENT


if __name__ == "__main__":
    torch.set_num_threads(1)  # comparing waits for the disk, not for a processor
    sys.exit(main())
