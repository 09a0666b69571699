"""Reads tensors out of a torch_dist checkpoint, whole, one layer, one expert or some rows at a time.

Reads directly into the requested tensor, without a process group, a model or a copy of the file.
Megatron-core stores the layers of a homogeneous model stacked along a first dimension under one key, or one by
one, and a layer's experts stacked along the next; all of these are found by a single tensor's name.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from slimrl.models.adapters import PART_OF_NAME
from slimrl.models.families.vision import MEGATRON_TOWER
from slimrl.weights.checkpoint_checksums import CheckedFolder, read_at
from slimrl.weights.safe_pickle import METADATA_NAME, read_metadata

TRACKER_NAME = "latest_checkpointed_iteration.txt"
_MODEL_PREFIXES = (MEGATRON_TOWER, "decoder.", "embedding.", "output_layer.", "value_head.", "mtp.")
_LAYER = re.compile(r"((?:decoder|mtp)\.layers\.)(\d+)\.(.*)")
# an expert of its own in a list of experts, or a numbered weight of grouped experts
_EXPERT = re.compile(r"(.*\.experts\.)(?:local_experts\.(\d+)\.(.*)|(linear_fc[12]\.(?:weight|bias))(\d+))")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor: a key, and the index (layer, expert) in it if several are stacked."""

    key: str
    place: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


class Scratch:
    """Reusable memory of one thread; each tensor overwrites the previous one."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, valid until the next call."""
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._bytes):
            self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size].view(dtype).view(shape)


@dataclasses.dataclass(frozen=True)
class _Block:
    """One stored block of a tensor as bytes in a file."""

    path: Path
    begin: int


def resolve_checkpoint(folder: Path) -> Path:
    """The checkpoint `folder`, or the one that its tracker file names.

    Raises FileNotFoundError if there is neither.
    """
    folder = Path(folder)
    tracker = folder / TRACKER_NAME
    if (folder / METADATA_NAME).is_file() or not tracker.is_file():
        return folder
    named = tracker.read_text(encoding="utf-8", errors="replace").strip()
    found = folder / (f"iter_{int(named):07d}" if named.isdigit() else named)
    if not named or not found.is_dir():
        shown = found.name if named else "no folder"
        raise FileNotFoundError(f"{tracker} names {shown}, which does not exist: give the folder of a checkpoint")
    return found


class TorchDistCheckpoint:
    """One checkpoint folder (`iter_...` or `release`); threads may share one."""

    def __init__(self, folder: Path) -> None:
        """Raises FileNotFoundError for a folder that is not a checkpoint, naming the ones inside it.

        Raises ValueError for damaged metadata, and UnsafePickleError for metadata that would execute code.
        """
        self.folder = Path(folder)
        if not (self.folder / METADATA_NAME).is_file():
            inside = sorted(path.parent.name for path in self.folder.glob(f"*/{METADATA_NAME}"))
            fix = f"give {self.folder / inside[-1]}" if inside else "give the iter_... or release folder of one"
            raise FileNotFoundError(f"{self.folder} is not a torch_dist checkpoint (it has no {METADATA_NAME}): {fix}")
        self._checked = CheckedFolder.open(self.folder)
        if self._checked is not None:
            self._checked.check([METADATA_NAME])
        metadata = read_metadata(self.folder)
        self._storage = metadata.storage_data
        self._tensors: dict[str, TensorStorageMetadata] = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and key.startswith(_MODEL_PREFIXES)
        }
        self._blocks: dict[tuple[str, torch.Size], _Block] = {}
        self._chunks_by_place: dict[tuple[str, int], dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}
        self._lock = threading.Lock()

    @classmethod
    def of_model(cls, folder: Path) -> TorchDistCheckpoint:
        """A checkpoint with the weights of a model. Raises ValueError for one of LoRA adapters, and as the class."""
        found = cls(folder)
        if any(PART_OF_NAME in name for name in found.sizes):
            raise ValueError(
                f"{folder} has LoRA adapters and not the weights that they belong to: export the merged model from"
                " training, with --save-hf and --lora-merge"
            )
        return found

    @property
    def checked(self) -> CheckedFolder | None:
        """Its files with their checksums, which every read verifies; None if the checkpoint has none."""
        return self._checked

    @property
    def sizes(self) -> dict[str, int]:
        """The number of elements of each key of the model, without optimizer and other state."""
        return {key: entry.size.numel() for key, entry in self._tensors.items()}

    def find(self, name: str) -> StoredTensor | None:
        """The tensor of a Megatron name (layers and experts by number), or None."""
        for key, place in _spellings(name):
            entry = self._tensors.get(key)
            if entry is None or len(place) > len(entry.size):
                continue
            if all(index < count for index, count in zip(place, entry.size, strict=False)):
                return StoredTensor(key, place, tuple(entry.size[len(place) :]), entry.properties.dtype)
        return None

    def read(
        self, stored: StoredTensor, rows: slice | None = None, empty: Callable[..., Tensor] = torch.empty
    ) -> Tensor:
        """The tensor's values in the stored dtype, or only those of some rows (`slice(begin, end)`).

        `empty(shape, dtype=...)` allocates the result; that of a `Scratch` reuses memory.
        Raises ValueError if the files do not match the metadata.
        """
        shape = list(stored.shape)
        first = 0
        if rows is not None:
            first, end, _ = rows.indices(shape[0])
            shape[0] = end - first
        entry = self._tensors[stored.key]
        target = empty(shape, dtype=entry.properties.dtype)
        begin = (*stored.place, first, *(0 for _ in shape[1:])) if shape else stored.place
        wanted = target[(None,) * len(stored.place)]
        chunks = self._chunks(stored)
        filled = sum(self._read_block(stored.key, chunk, wanted, begin) for chunk in chunks)
        if filled != target.numel():
            raise ValueError(f"{self.folder}: {stored.key} is only partly stored: the checkpoint is damaged")
        return target

    def _chunks(self, stored: StoredTensor) -> list[ChunkStorageMetadata]:
        """The blocks of a tensor, found by an index because a key may have those of thousands of tensors."""
        depth = len(stored.place)
        with self._lock:
            by_place = self._chunks_by_place.get((stored.key, depth))
            if by_place is None:
                by_place = defaultdict(list)
                for chunk in self._tensors[stored.key].chunks:
                    spans = zip(chunk.offsets[:depth], chunk.sizes[:depth], strict=True)
                    for place in itertools.product(*(range(begin, begin + length) for begin, length in spans)):
                        by_place[place].append(chunk)
                self._chunks_by_place[stored.key, depth] = by_place
        return by_place.get(stored.place, [])

    def _read_block(self, key: str, chunk: ChunkStorageMetadata, wanted: Tensor, begin: tuple[int, ...]) -> int:
        """Copies the part of `chunk` that is in `wanted`, which starts at `begin`; returns the elements copied."""
        low = [max(a, b) for a, b in zip(chunk.offsets, begin, strict=True)]
        high = [
            min(a + length, b + size)
            for a, length, b, size in zip(chunk.offsets, chunk.sizes, begin, wanted.shape, strict=True)
        ]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return 0
        block = self._locate(key, chunk)
        source = [slice(a - offset, b - offset) for a, b, offset in zip(low, high, chunk.offsets, strict=True)]
        target = wanted[tuple(slice(a - offset, b - offset) for a, b, offset in zip(low, high, begin, strict=True))]
        position = _contiguous_begin(source, chunk.sizes)
        if position is not None and target.is_contiguous():
            self._fill(block, position, target)
        else:
            whole = torch.empty(chunk.sizes, dtype=wanted.dtype)
            self._fill(block, 0, whole)
            target.copy_(whole[tuple(source)])
        return target.numel()

    def _fill(self, block: _Block, position: int, target: Tensor) -> None:
        """Reads `target`'s bytes, starting at element `position` of the block."""
        view = target.view(-1).view(torch.uint8).numpy().data
        begin = block.begin + position * target.dtype.itemsize
        descriptor = os.open(block.path, os.O_RDONLY)
        try:
            if self._checked is None:
                count = read_at(descriptor, begin, view)
            else:
                count = self._checked.read_into(descriptor, block.path.name, begin, view)
        finally:
            os.close(descriptor)
        if count < len(view):
            raise ValueError(f"{block.path} ends early: the checkpoint is damaged")

    def _locate(self, key: str, chunk: ChunkStorageMetadata) -> _Block:
        """Byte offset of the values of a stored block, which is a small archive of torch.save."""
        with self._lock:
            known = self._blocks.get((key, chunk.offsets))
        if known is not None:
            return known
        info = self._storage[MetadataIndex(key, chunk.offsets)]
        path = self.folder / info.relative_path
        if info.transform_descriptors:
            raise ValueError(
                f"{path}: {key} is stored compressed ({', '.join(info.transform_descriptors)}), which cannot be read:"
                " save the checkpoint without transforms"
            )
        if not path.is_file():
            raise ValueError(f"{path}, which holds {key}, does not exist: the checkpoint is incomplete")
        with path.open("rb") as file:
            # on the meta device only the archive's directory is read, which has the offset of the values
            archive = cast("IO[bytes]", _create_file_view(file, info.offset, info.length))
            try:
                empty = torch.load(archive, map_location="meta", weights_only=True)
            except RuntimeError as error:  # torch's archive reader has no specific error
                reason = str(error).splitlines()[0].partition(". ")[0]
                raise ValueError(f"{path}: {key} cannot be read ({reason}): the checkpoint is damaged") from error
        if empty.shape != chunk.sizes or not empty.is_contiguous():
            raise ValueError(
                f"{path}: a block of {key} has shape {list(empty.shape)} and the metadata says {list(chunk.sizes)}:"
                " the checkpoint is damaged"
            )
        inside = empty.untyped_storage()._checkpoint_offset + empty.storage_offset() * empty.dtype.itemsize
        block = _Block(path, info.offset + inside)
        with self._lock:
            self._blocks[key, chunk.offsets] = block
        return block


def _contiguous_begin(part: list[slice], sizes: torch.Size) -> int | None:
    """The first element of a part of a block if it is one run of elements, else None."""
    narrowed = False
    for dim in range(len(sizes) - 1, -1, -1):
        length = part[dim].stop - part[dim].start
        if narrowed and length != 1:
            return None
        narrowed = narrowed or length != sizes[dim]
    begin: int = sum(piece.start * math.prod(sizes[dim + 1 :]) for dim, piece in enumerate(part))
    return begin


def _spellings(name: str) -> list[tuple[str, tuple[int, ...]]]:
    """The possible keys of the tensor of this name, each with its index there."""
    found: list[tuple[str, tuple[int, ...]]] = [(name, ())]
    if match := _EXPERT.fullmatch(name):
        prefix, number, rest, grouped, grouped_number = match.groups()
        expert, tail = int(number or grouped_number), rest or grouped
        found += [(f"{prefix}experts.{tail}", (expert,)), (f"{prefix}experts.{expert}.{tail}", ())]
    for key, place in list(found):
        if match := _LAYER.fullmatch(key):
            before, layer, after = match.groups()
            found.append((before + after, (int(layer), *place)))
    return found
