#!/usr/bin/env python3
"""Check that a torch_dist checkpoint has the bytes that were written, and compare it with a Hugging Face folder.

    python tools/check_checkpoint.py --input-dir model_torch_dist
    python tools/check_checkpoint.py --input-dir model_torch_dist --hf-checkpoint model

The first compares every file with the checkpoint's checksums. The second also compares names, shapes, dtypes and
values, and prints the tensors that differ most. Exit code 0 if all is well, 1 if the models differ, 2 if a folder
cannot be read or is damaged. Every tensor of either side is compared or reported as being on one side only. A few rows
or one layer's tensors are read at a time: the whole model is never in memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from slimrl.models.families import ModelMapping, ParamMapping, family_for
from slimrl.models.families.param_mapping import NON_PARAMETER_SUFFIXES
from slimrl.models.model_spec import ModelSpec
from slimrl.observability.terminal import ByteBar
from slimrl.processes.files import listed
from slimrl.weights.convert.torch_dist_reader import StoredTensor, TorchDistCheckpoint, resolve_checkpoint
from slimrl.weights.hf_checkpoint import HfCheckpoint, local_hf_folder, read_hf_config
from slimrl.weights.reshard import from_shards, hf_shapes, megatron_shape, redundant_head

NAME = Path(__file__).name
EQUAL, DIFFERENT, BAD_INPUT = 0, 1, 2
_RUN_BYTES = 8 * 1024**2
_RUN_ELEMENTS = 1024**2
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


@dataclasses.dataclass(frozen=True)
class TensorPair:
    """One Hugging Face tensor on both sides; the difference is None if the shapes differ."""

    name: str
    stored_shape: tuple[int, ...]
    hf_shape: tuple[int, ...]
    stored_dtype: torch.dtype
    hf_dtype: torch.dtype
    max_difference: float | None

    def is_equal(self, tolerance: float) -> bool:
        """Whether dtype and shape are the same and no element differs by more than `tolerance`."""
        return (
            self.stored_dtype == self.hf_dtype and self.max_difference is not None and self.max_difference <= tolerance
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All tensors of both sides."""

    pairs: tuple[TensorPair, ...]
    only_stored: tuple[str, ...]  # keys of the torch_dist checkpoint
    only_hf: tuple[str, ...]
    not_converted: tuple[str, ...]  # of layers that are kept in Hugging Face folders only

    def worst(self) -> list[TensorPair]:
        """The pairs, sorted by descending difference."""
        return sorted(self.pairs, key=_badness, reverse=True)

    def is_equal(self, tolerance: float = 0.0) -> bool:
        """Whether no tensor differs, none is on one side only, and there is at least one."""
        one_sided = self.only_stored or self.only_hf
        return bool(self.pairs) and not one_sided and all(pair.is_equal(tolerance) for pair in self.pairs)


def _badness(pair: TensorPair) -> tuple[bool, float, bool]:
    return pair.max_difference is None, pair.max_difference or 0.0, pair.stored_dtype != pair.hf_dtype


def compare_checkpoints(
    input_dir: Path, hf_dir: Path, on_start: Callable[[int], Callable[[int], object]] = lambda n: lambda done: None
) -> Comparison:
    """Compares the checkpoint folder `input_dir` with `hf_dir`, whose config.json determines the family.

    `on_start` is called with the bytes of the folder's tensors, and its result with those of each compared part. Raises
    FileNotFoundError or ValueError for a folder that is not such a checkpoint.
    """
    config = read_hf_config(hf_dir)
    family, spec = family_for(config), ModelSpec.from_hf_config(config)
    checkpoint = TorchDistCheckpoint.of_model(input_dir)
    with HfCheckpoint(hf_dir) as origin:
        names = {name for name in origin.names if not name.endswith(NON_PARAMETER_SUFFIXES)}
        on_compared = on_start(sum(math.prod(origin.shape(name)) * origin.dtype(name).itemsize for name in names))
        comparer = _Comparer(checkpoint, origin, family, spec, on_compared)
        unused = checkpoint.sizes
        pairs: list[TensorPair] = []
        for row, stored in _stored_rows(checkpoint, family, spec):
            unused[stored.key] -= math.prod(stored.shape)
            pairs += comparer.pairs(row, stored)
    unseen = names - {pair.name for pair in pairs}
    carried = {name for name in unseen if name.startswith(family.carried_prefixes(config))}
    return Comparison(
        tuple(pairs),
        tuple(sorted(key for key, elements in unused.items() if elements)),
        tuple(sorted(unseen - carried)),
        tuple(sorted(carried)),
    )


def _stored_rows(
    checkpoint: TorchDistCheckpoint, family: ModelMapping, spec: ModelSpec
) -> Iterator[tuple[ParamMapping, StoredTensor]]:
    for row in family.rows(spec):
        found = next((place for name in row.megatron if (place := checkpoint.find(name)) is not None), None)
        if found is not None:
            yield row, found


class _Comparer:
    """Compares rows of one model, reading each side once."""

    def __init__(
        self,
        checkpoint: TorchDistCheckpoint,
        origin: HfCheckpoint,
        family: ModelMapping,
        spec: ModelSpec,
        on_compared: Callable[[int], object],
    ) -> None:
        self._checkpoint = checkpoint
        self._origin = origin
        self._names = set(origin.names)
        self._embedding = family.embedding.hf
        self._head = redundant_head(origin.names, family, spec)
        self._spec = spec
        self._on_compared = on_compared

    def pairs(self, row: ParamMapping, stored: StoredTensor) -> Iterator[TensorPair]:
        """The tensors of one row, without those that have no Hugging Face tensor."""
        sizes = hf_shapes(row, self._spec)
        wanted = {part.name: size for part, size in zip(row.hf, sizes, strict=True)}
        if row.hf == self._embedding and self._head is not None:
            wanted[self._head] = sizes[0]
        fits = self._fits(row, stored)
        whole = {} if row.padded_vocab or not fits else self._whole(row, stored)
        for name in [name for name in wanted if name in self._names]:
            difference = None
            if fits and self._origin.shape(name) == wanted[name]:
                theirs = self._origin.tensor(name)
                runs = self._vocabulary(stored, theirs) if row.padded_vocab else [(whole[name], theirs)]
                difference = max(self._compared(*run) for run in runs)
            shown = wanted[name] if fits else stored.shape
            yield TensorPair(name, shown, self._origin.shape(name), stored.dtype, self._origin.dtype(name), difference)

    def _fits(self, row: ParamMapping, stored: StoredTensor) -> bool:
        if not row.padded_vocab:
            return stored.shape == megatron_shape(row, self._spec)
        padded = dataclasses.replace(self._spec, padded_vocab_size=stored.shape[0])
        return stored.shape == megatron_shape(row, padded) and stored.shape[0] >= self._spec.vocab_size

    def _whole(self, row: ParamMapping, stored: StoredTensor) -> dict[str, Tensor]:
        parts = from_shards(row, [self._checkpoint.read(stored)], self._spec)
        return {part.name: tensor for part, tensor in zip(row.hf, parts, strict=True)}

    def _vocabulary(self, stored: StoredTensor, theirs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Embedding or head in runs of rows, without padding."""
        step = max(1, _RUN_BYTES * len(theirs) // max(1, theirs.nbytes))
        for begin in range(0, len(theirs), step):
            rows = slice(begin, min(begin + step, len(theirs)))
            yield self._checkpoint.read(stored, rows), theirs[rows]

    def _compared(self, mine: Tensor, theirs: Tensor) -> float:
        difference = max_difference(mine, theirs)
        self._on_compared(theirs.nbytes)
        return difference


def max_difference(first: Tensor, second: Tensor) -> float:
    """The largest absolute difference of corresponding elements; infinite if only one of them is NaN."""
    highest = 0.0
    for one, other in zip(first.reshape(-1).split(_RUN_ELEMENTS), second.reshape(-1).split(_RUN_ELEMENTS), strict=True):
        if one.dtype == other.dtype and not (one.view(bits := _BITS[one.itemsize]) != other.view(bits)).any():
            continue
        one, other = one.double(), other.double()
        apart = torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, (one - other).abs())
        highest = max(highest, float(apart.nan_to_num(nan=math.inf, posinf=math.inf).max()))
    return highest


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
