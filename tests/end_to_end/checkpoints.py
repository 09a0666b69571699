"""Reads a training checkpoint without slimrl: with torch's own reader, outside any process group."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def read(folder: Path) -> dict[str, Any]:
    """Every entry: weights, optimizer state and random state, the common part, and the position in the data.

    A critic's has no position.
    """
    reader = checkpoint.FileSystemReader(folder)
    entries: dict[str, Any] = {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        is_tensor = isinstance(stored, TensorStorageMetadata)
        entries[name] = torch.full(stored.size, torch.nan, dtype=stored.properties.dtype) if is_tensor else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that torch.distributed is not initialized
        checkpoint.load(entries, storage_reader=reader, no_dist=True)
    for part in (folder / "common.pt", folder / "data_state.pt"):
        if part.name == "common.pt" or part.exists():
            entries[part.stem] = torch.load(part, weights_only=False)
    return entries


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Paths at which two values are not bit-identical."""
    if type(one) is not type(other):
        return [f"{where}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [where]
    if isinstance(one, Mapping):
        if one.keys() != other.keys():
            return [f"{where}: keys {sorted(map(str, one.keys() ^ other.keys()))}"]
        return [place for key in one for place in differences(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{where}: {len(one)} and {len(other)} entries"]
        return [p for i, pair in enumerate(zip(one, other, strict=True)) for p in differences(*pair, f"{where}/{i}")]
    if isinstance(one, io.BytesIO):
        return differences(one.getvalue(), other.getvalue(), where)
    if hasattr(one, "shape"):  # NumPy's generator state
        return [] if one.dtype == other.dtype and (one == other).all() else [where]
    return [] if one == other else [f"{where}: {one!r} and {other!r}"]
