"""Reads tensors out of a torch_dist checkpoint, whole or one layer at a time, without process group or model.

Promises to hold no more than the one tensor asked for. Megatron-core stores the layers of a homogeneous model
either stacked along a new first dimension under one key, or one by one; both are found by a layer's tensor name.
"""

from __future__ import annotations

import dataclasses
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.(.*)")
_MODEL_PREFIXES = ("decoder.", "embedding.", "output_layer.")
_METADATA_NAME = ".metadata"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: a key, and the layer's place in it where layers are stacked."""

    key: str
    layer: int | None
    shape: tuple[int, ...]


class TorchDistCheckpoint:
    """One checkpoint folder (`iter_...` or `release`)."""

    def __init__(self, folder: Path) -> None:
        """Raises FileNotFoundError for a folder that is no checkpoint, naming the ones inside it."""
        self.folder = Path(folder)
        if not (self.folder / _METADATA_NAME).is_file():
            inside = sorted(path.parent.name for path in self.folder.glob(f"*/{_METADATA_NAME}"))
            mend = f"give {self.folder / inside[-1]}" if inside else "give the iter_... or release folder of one"
            raise FileNotFoundError(
                f"{self.folder} is not a torch_dist checkpoint (it has no {_METADATA_NAME}): {mend}"
            )
        self._reader = FileSystemReader(self.folder)
        metadata: Metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._tensors: dict[str, TensorStorageMetadata] = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and key.startswith(_MODEL_PREFIXES)
        }

    @property
    def model_keys(self) -> set[str]:
        """The keys of the model's tensors; optimizer and other state is left out."""
        return set(self._tensors)

    def find(self, name: str) -> StoredTensor | None:
        """The tensor of a Megatron name (layers by number), None where the checkpoint has none."""
        if name in self._tensors:
            return StoredTensor(name, None, tuple(self._tensors[name].size))
        match = _LAYER.fullmatch(name)
        stacked = match and match.group(1) + match.group(3)
        if not stacked or stacked not in self._tensors:
            return None
        count, *shape = self._tensors[stacked].size
        layer = int(match.group(2))
        return StoredTensor(stacked, layer, tuple(shape)) if layer < count else None

    def layers_of(self, key: str) -> int | None:
        """The number of layers under a stacked key, None for a key of one tensor."""
        if key.startswith("decoder.layers.") and not _LAYER.fullmatch(key):
            return self._tensors[key].size[0]
        return None

    def read(self, stored: StoredTensor) -> Tensor:
        """The tensor's values, in the dtype they are stored in."""
        entry = self._tensors[stored.key]
        stacked = stored.layer is not None
        offsets = (stored.layer, *(0 for _ in stored.shape)) if stacked else tuple(0 for _ in stored.shape)
        sizes = (1, *stored.shape) if stacked else stored.shape
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        target = torch.empty(sizes, dtype=entry.properties.dtype)
        items = create_read_items_for_chunk_list(stored.key, entry, [chunk])
        self._reader.read_data(LoadPlan(items), _Into(target)).wait()
        return target[0] if stacked else target


class _Into(LoadPlanner):
    """Puts every piece that is read to its place in one tensor."""

    def __init__(self, target: Tensor) -> None:
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        place = self._target
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            place = place.narrow(dim, offset, length)
        return place

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """The piece was written through the view that `resolve_tensor` gave."""

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("the plan is made by TorchDistCheckpoint.read")

    create_local_plan = create_global_plan = finish_plan = set_up_planner

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        raise NotImplementedError("only tensors are read")
