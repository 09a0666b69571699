"""Writes and reads the sharded tensors of a checkpoint in megatron-core's torch_dist format.

This process writes without child processes: megatron-core's own writer forks the worker and starts a manager process
for each save, which costs seconds and can hang with gloo or gRPC threads. The files are the same. `prepare` uses the
process groups of training, `write` only the group passed to it, so that it may run in another thread.
The functions that replace readers of megatron-core and torch return the same results, reject pickles that would execute
code (`slimrl.weights.safe_pickle`), and verify the checkpoint's checksums
(`slimrl.weights.checkpoint_checksums`). `slimrl.megatron.patches` applies them where checkpoints are loaded.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem
from torch.utils.serialization import config as serialization_config

from slimrl.megatron.checkpoint import folder as checkpoint_folder
from slimrl.platform import is_cpu
from slimrl.platform.collective_errors import CheckpointError, room_left
from slimrl.weights.checkpoint_checksums import CheckedFolder, ChecksummingWriter, Checksums
from slimrl.weights.direct_reader import DirectReads
from slimrl.weights.hf_checkpoint_writer import with_own_storage
from slimrl.weights.safe_pickle import METADATA_NAME, load_plain, read_metadata

# Entries of a full checkpoint that loading only the model skips.
_NOT_MODEL = ("optimizer.", "chained_", "rng_state")
_METADATA_KEY = "content_metadata"


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Data to write: this rank's tensors by key, its other objects in the format of torch's writer, and the common data
    that rank 0 writes.
    """

    tensors: dict[str, list[ShardedTensor]]
    objects: dict[str, Any]
    common: bytes

    def copy_to_host(self) -> None:
        """Copy the tensors, so that training may change them; before this they are the live ones."""
        for shard in (shard for shards in self.tensors.values() for shard in shards):
            assert shard.data is not None
            shard.data = shard.data.detach().to("cpu", copy=True)


class Division:
    """Which data-parallel rank writes which of the tensors that several ranks have; the same in every save of a run.

    The first save determines it and compares all ranks' tensors, which takes several exchanges between all ranks.
    """

    def __init__(self) -> None:
        self._divided: FullyParallelSaveStrategyWrapper | None = None
        self._names: set[Any] = set()

    def keep_own(self, state: ShardedStateDict) -> tuple[ShardedStateDict, dict[str, Any]]:
        """The tensors and objects of `state`, marked for writing by one rank each, and the common data; collective.

        Raises ValueError if the tensors are not those of the first save.
        """
        first = self._divided is None
        sharded, common = save_preprocess(state, validate_access_integrity=first)
        names = {
            _sharded_tensor_shard_id(entry) for entry in nested_values(sharded) if isinstance(entry, ShardedTensor)
        }
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if self._divided is None:
            self._divided = FullyParallelSaveStrategyWrapper(
                TorchDistSaveShardedStrategy("torch_dist", 1), group, do_cache_distribution=True
            )
            self._names = names
        elif names != self._names:
            changed = sorted(str(name[0]) for name in names ^ self._names)
            raise ValueError(f"the tensors to save changed since the first save: {_listed(changed)}")
        if first or group.size() > 1:  # one rank alone has nothing to divide
            self._divided.apply_saving_parallelization(sharded)
        return sharded, common


def prepare(state: ShardedStateDict, metadata: dict[str, Any], division: Division) -> Prepared:
    """Distribute `state` over the ranks for writing; collective over all ranks.

    The result has the live tensors: `Prepared.copy_to_host`, or write them before they change. `metadata` is stored
    too and returned by `read_metadata`.
    """
    sharded, common = division.keep_own({**state, _METADATA_KEY: metadata})
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    tensors = {key: entries for key, entries in by_key.items() if isinstance(entries[0], ShardedTensor)}
    objects = mcore_to_pyt_state_dict({key: by_key[key] for key in by_key.keys() - tensors.keys()}, False)
    buffer = io.BytesIO()
    torch.save(common, buffer)
    return Prepared(tensors, objects, buffer.getvalue())


def write(prepared: Prepared, folder: Path, group: dist.ProcessGroup | None = None) -> dict[str, Checksums]:
    """Write this rank's part into the existing, empty `folder`; collective over `group`, all ranks.

    Returns the checksums of all ranks' files by name, on rank 0 only. The folder becomes a checkpoint with the last
    step, `write_common`. Raises CheckpointError, on every rank, if a rank could not write.
    """
    writer = ChecksummingWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
    try:
        # the archives' own checksums are slower than ours, and torch.load ignores them
        with serialization_config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            torch_checkpoint.save(
                {**mcore_to_pyt_state_dict(dict(prepared.tensors), False), **prepared.objects},
                storage_writer=writer,
                planner=_SavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=group,
            )
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(f"rank {rank}: {_told(cause)}") from error
    return writer.checksums


class _SavePlanner(MCoreSavePlanner):
    """Hands out views of the live tensors in a way in which torch's writer does not copy them."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value: torch.Tensor | io.BytesIO = super().resolve_data(write_item)
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            return with_own_storage(value.detach())
        return value


def _told(cause: BaseException) -> str:
    return f"{type(cause).__name__}: {cause}" + room_left(cause)


def write_common(prepared: Prepared, folder: Path) -> None:
    """Write rank 0's common data, after every rank has written its part."""
    checkpoint_folder.write_bytes(folder / COMMON_STATE_FNAME, prepared.common)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def read_training_metadata(folder: Path) -> dict[str, Any]:
    """The metadata stored besides the tensors; empty for a checkpoint of another program."""
    return dist_checkpointing.load_content_metadata(str(folder)) or {}


def stored_names(folder: Path) -> set[str]:
    """The names of everything stored in the checkpoint `folder`."""
    _check(folder, METADATA_NAME)
    return set(read_metadata(folder).state_dict_metadata)


def read(state: ShardedStateDict, folder: Path, *, model_only: bool, ignored: Collection[str] = ()) -> dict[str, Any]:
    """`state` with its tensors loaded from `folder`, which any layout may have written; collective over all ranks.

    Extra state of modules may be absent on either side and is then omitted from the result. Raises ValueError if the
    checkpoint lacks requested tensors, has model tensors that are neither requested nor `ignored`, or is damaged or
    unsafe to open.
    """
    dict_list_map_inplace(_merged_in_place, state)
    strategy = get_default_load_sharded_strategy(str(folder))
    if not is_cpu():  # between CPUs sending a tensor takes longer than reading it from the cache again
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = FullyParallelLoadStrategyWrapper(strategy, group)
    try:
        loaded, absent_here, absent_there = dist_checkpointing.load(
            state, str(folder), sharded_strategy=strategy, strict=StrictHandling.RETURN_ALL
        )
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise ValueError(f"{folder} is not loaded, rank {rank}: {cause}") from error
    left_over = sorted(
        key
        for key in absent_here
        if not is_extra_state(key) and key not in ignored and not any(part in key for part in _NOT_MODEL)
    )
    missing = sorted(key for key in absent_there if not is_extra_state(key))
    if missing:
        raise ValueError(
            f"{folder} lacks {_listed(missing)}: it was saved from a model of another shape; give the model"
            " flags that it was saved with, or another folder"
        )
    if model_only and left_over:
        raise ValueError(f"{folder} has {_listed(left_over)}, which this model does not have: the model flags differ")
    return loaded


def _merged_in_place(entry: Any) -> Any:
    """A weight that is stored in several blocks, without new memory if all of them were read into the weight."""
    if not isinstance(entry, ShardedTensorFactory):
        return entry

    def merge(parts: Any) -> Any:
        blocks, loaded = list(nested_values(entry.build())), list(nested_values(parts))
        if all(block.data.data_ptr() == part.data_ptr() for block, part in zip(blocks, loaded, strict=True)):
            return entry.data
        return entry.merge_fn(parts)

    return dataclasses.replace(entry, merge_fn=merge)


def is_extra_state(key: str) -> bool:
    """Whether `key` is a module's extra state besides parameters and buffers (torch's `get_extra_state`).

    With Transformer Engine that is fp8 scaling state, and empty without fp8: which modules have it depends on the
    layers that wrote a checkpoint, not on the model.
    """
    return key.rpartition(".")[2].startswith("_extra_state")


def _listed(keys: list[str]) -> str:
    shown = ", ".join(keys[:5])
    return shown if len(keys) <= 5 else f"{shown} and {len(keys) - 5} more"


def open_pickles_safely() -> None:
    """Replaces the readers of `.metadata`, of objects besides the tensors, and of `common.pt`."""
    files = importlib.import_module("torch.distributed.checkpoint.filesystem")
    planner = importlib.import_module("torch.distributed.checkpoint.default_planner")
    common = importlib.import_module("megatron.core.dist_checkpointing.strategies.common")
    files.FileSystemReader.read_metadata = _read_metadata
    planner.DefaultLoadPlanner.load_bytes = _load_bytes
    common.TorchCommonLoadStrategy.load_common = _load_common


def verify_what_is_read() -> None:
    """Replaces how megatron-core opens the files of tensors."""
    strategies: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
    strategies._get_filesystem_reader = _open_reader


class _Reader(DirectReads, FileSystemReader):
    """Reads tensors into place, with verification if the checkpoint has checksums."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.checked = CheckedFolder.open(path)


class _CachedReader(DirectReads, CachedMetadataFileSystemReader):
    """The same; all readers of one checkpoint read `.metadata` once."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.checked = CheckedFolder.open(path)


def _open_reader(checkpoint_dir: str | Path, cache_metadata: bool = False) -> Any:
    """Replaces `_get_filesystem_reader`."""
    return (_CachedReader if cache_metadata else _Reader)(checkpoint_dir)


def _read_metadata(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `FileSystemReader.read_metadata`, without its per-rank metadata files, which slimrl does not use."""
    _check(Path(self.path), METADATA_NAME)
    metadata = read_metadata(Path(self.path))
    assert metadata.storage_meta is not None  # ensured by `read_metadata`
    metadata.storage_meta.load_id = self.load_id
    return metadata


def _load_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
    """Replaces `DefaultLoadPlanner.load_bytes`, which would open any pickle."""
    key = read_item.dest_index.fqn
    loaded = load_plain(value, f"the checkpoint's entry {key}")
    if self.flatten_state_dict:
        traverse = importlib.import_module("torch.distributed.checkpoint._traverse")
        traverse.set_element(self.original_state_dict, self.mappings[key], loaded)
    else:
        self.state_dict[key] = loaded


def _load_common(self: Any, checkpoint_dir: str | Path) -> Any:
    """Replaces `TorchCommonLoadStrategy.load_common`."""
    common = importlib.import_module("megatron.core.dist_checkpointing.strategies.common")
    path = Path(checkpoint_dir) / common.COMMON_STATE_FNAME
    _check(path.parent, path.name)
    return load_plain(path, path)


def _check(folder: Path, name: str) -> None:
    if (checked := CheckedFolder.open(folder)) is not None:
        checked.check([name])
