"""What is put in the place of the functions by which megatron-core and torch read a checkpoint.

Each reads the same files to the same result, refuses what would run a program (`slimrl.weights.safe_pickle`), and
compares what it reads with the checkpoint's checksums (`slimrl.weights.file_checksums`). Applied by
`slimrl.megatron.patches`, in every process that loads a checkpoint.
"""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

from slimrl.weights.checksummed_files import CheckedFiles
from slimrl.weights.file_checksums import CheckedFolder
from slimrl.weights.safe_pickle import METADATA_NAME, load_plain, read_metadata


def open_pickles_safely() -> None:
    """Replaces the readers of `.metadata`, of objects beside the tensors, and of `common.pt`."""
    files = importlib.import_module("torch.distributed.checkpoint.filesystem")
    planner = importlib.import_module("torch.distributed.checkpoint.default_planner")
    common = importlib.import_module("megatron.core.dist_checkpointing.strategies.common")
    files.FileSystemReader.read_metadata = _read_metadata
    planner.DefaultLoadPlanner.load_bytes = _load_bytes
    common.TorchCommonLoadStrategy.load_common = _load_common


def verify_what_is_read() -> None:
    """Replaces how megatron-core opens the files of tensors."""
    strategies = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
    strategies._get_filesystem_reader = _open_reader


def _open_reader(checkpoint_dir: str | Path, cache_metadata: bool = False) -> Any:
    """In the place of `_get_filesystem_reader`."""
    strategies = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
    kind = strategies.CachedMetadataFileSystemReader if cache_metadata else strategies.FileSystemReader
    reader = kind(checkpoint_dir)
    if (checked := CheckedFolder.open(checkpoint_dir)) is not None:
        reader.fs = CheckedFiles(checked)
    return reader


def _read_metadata(self: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of `FileSystemReader.read_metadata`; a file per rank is never written here, nor read."""
    _check(Path(self.path), METADATA_NAME)
    metadata = read_metadata(Path(self.path))
    metadata.storage_meta.load_id = self.load_id
    return metadata


def _load_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
    """In the place of `DefaultLoadPlanner.load_bytes`, which would open any pickle."""
    key = read_item.dest_index.fqn
    loaded = load_plain(value, f"the checkpoint's entry {key}")
    if self.flatten_state_dict:
        traverse = importlib.import_module("torch.distributed.checkpoint._traverse")
        traverse.set_element(self.original_state_dict, self.mappings[key], loaded)
    else:
        self.state_dict[key] = loaded


def _load_common(self: Any, checkpoint_dir: str | Path) -> Any:
    """In the place of `TorchCommonLoadStrategy.load_common`."""
    common = importlib.import_module("megatron.core.dist_checkpointing.strategies.common")
    path = Path(checkpoint_dir) / common.COMMON_STATE_FNAME
    _check(path.parent, path.name)
    return load_plain(path, path)


def _check(folder: Path, name: str) -> None:
    if (checked := CheckedFolder.open(folder)) is not None:
        checked.check([name])
