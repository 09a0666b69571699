"""Writes and reads the sharded tensors of a checkpoint in megatron-core's torch_dist format.

Writes from this process alone: megatron-core's own writer forks the worker and starts a manager process for each save,
which costs seconds and can hang beside gloo or gRPC threads. The files are the same. `prepare` talks to the other ranks
through the groups of training, `write` only through the group it is given, so that it may run in another thread.
The functions that replace readers of megatron-core and torch read the same files to the same result, reject what would
run a program (`slimrl.weights.safe_pickle`), and compare what they read with the checkpoint's checksums
(`slimrl.weights.checkpoint_checksums`). `slimrl.megatron.patches` applies them where checkpoints are loaded.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
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
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.serialization import config as serialization_config

from slimrl.megatron.checkpoint import folder as checkpoint_folder
from slimrl.platform.collective_errors import CheckpointError, room_left
from slimrl.weights.checkpoint_checksums import CheckedFiles, CheckedFolder, ChecksummingWriter, Checksums
from slimrl.weights.safe_pickle import METADATA_NAME, load_plain, read_metadata

# Entries of a full checkpoint that a model alone does not ask for.
_NOT_MODEL = ("optimizer.", "chained_", "rng_state")
_METADATA_KEY = "content_metadata"


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What this rank writes: its share of the tensors, as torch's writer takes them, and what rank 0 writes for all."""

    tensors: dict[str, Any]
    common: bytes


def prepare(state: ShardedStateDict, metadata: dict[str, Any], *, copy: bool) -> Prepared:
    """Share out `state` among the ranks; collective over all of them.

    With `copy` the tensors are copied to the host, so that nothing changes in them when training continues; else they
    are read where they are by `write`. `metadata` is stored too and given back by `read_metadata`.
    """
    sharded, common = save_preprocess({**state, _METADATA_KEY: metadata})
    FullyParallelSaveStrategyWrapper(
        TorchDistSaveShardedStrategy("torch_dist", 1),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    ).apply_saving_parallelization(sharded)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    if copy:
        for shard in (shard for shards in by_key.values() for shard in shards if isinstance(shard, ShardedTensor)):
            shard.data = shard.data.detach().to("cpu", copy=True)
    buffer = io.BytesIO()
    torch.save(common, buffer)
    return Prepared(mcore_to_pyt_state_dict(by_key, False), buffer.getvalue())


def write(prepared: Prepared, folder: Path, group: dist.ProcessGroup | None = None) -> dict[str, Checksums]:
    """Write this rank's share into the existing, empty `folder`; collective over `group`, all ranks.

    Returns the checksums of all ranks' files by name, on rank 0 alone. Without the last step, `write_common`, the
    folder is no checkpoint. Raises CheckpointError, on every rank, where one could not write.
    """
    writer = ChecksummingWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
    try:
        # the archives' own checksums are slower than ours, and torch.load never looks at them
        with serialization_config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            torch_checkpoint.save(
                prepared.tensors,
                storage_writer=writer,
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=group,
            )
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(f"rank {rank}: {_told(cause)}") from error
    return writer.checksums


def _told(cause: BaseException) -> str:
    return f"{type(cause).__name__}: {cause}" + room_left(cause)


def write_common(prepared: Prepared, folder: Path) -> None:
    """What rank 0 adds once every rank has written its share."""
    checkpoint_folder.write_bytes(folder / COMMON_STATE_FNAME, prepared.common)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def read_training_metadata(folder: Path) -> dict[str, Any]:
    """What `write` stored beside the tensors; empty for a checkpoint of another program."""
    return dist_checkpointing.load_content_metadata(str(folder)) or {}


def read(state: ShardedStateDict, folder: Path, *, model_only: bool) -> dict[str, Any]:
    """`state` with its tensors read from `folder`, whatever layout wrote them; collective over all ranks.

    Extra state of modules may be absent on either side: what is asked for and not there is left out of the result.
    Raises ValueError where the checkpoint lacks tensors that are asked for, holds model tensors that are not, or is
    damaged or unsafe to open.
    """
    strategy = FullyParallelLoadStrategyWrapper(
        get_default_load_sharded_strategy(str(folder)),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    try:
        loaded, absent_here, absent_there = dist_checkpointing.load(
            state, str(folder), sharded_strategy=strategy, strict=StrictHandling.RETURN_ALL
        )
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise ValueError(f"{folder} is not loaded, rank {rank}: {cause}") from error
    left_over = sorted(
        key for key in absent_here if not is_extra_state(key) and not any(part in key for part in _NOT_MODEL)
    )
    missing = sorted(key for key in absent_there if not is_extra_state(key))
    if missing:
        raise ValueError(f"{folder} lacks {_listed(missing)}: it was saved from a model of another shape")
    if model_only and left_over:
        raise ValueError(f"{folder} holds {_listed(left_over)}, which this model has not: the model flags differ")
    return loaded


def is_extra_state(key: str) -> bool:
    """Whether `key` names what a module keeps beside its parameters and buffers (torch's `get_extra_state`).

    With Transformer Engine that is fp8 scaling state, and empty without fp8: which modules have it depends on the
    layers that wrote a checkpoint, not on the model.
    """
    return key.rpartition(".")[2].startswith("_extra_state")


def _listed(keys: list[str]) -> str:
    shown = ", ".join(keys[:5])
    return shown if len(keys) <= 5 else f"{shown} and {len(keys) - 5} more"


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
    strategies: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
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
    assert metadata.storage_meta is not None  # `read_metadata` sees to it
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
