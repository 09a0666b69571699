"""Writes and reads the sharded tensors of a checkpoint in megatron-core's torch_dist format.

Promises to write from this process alone: megatron-core's own writer forks the worker and starts a manager
process for each save, which costs seconds and can hang beside gloo or gRPC threads. Files are the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
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

# Entries of a full checkpoint that a model alone does not ask for.
_NOT_MODEL = ("optimizer.", "chained_", "rng_state", "_extra_state")


class _InProcessSave(TorchDistSaveShardedStrategy):
    """The torch_dist format written by torch's own file writer, in threads of this process."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> None:
        """Write this rank's main replicas to `checkpoint_dir`; collective over all ranks."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=torch_checkpoint.FileSystemWriter(
                checkpoint_dir, single_file_per_rank=True, sync_files=True, thread_count=1
            ),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def write(state: ShardedStateDict, folder: Path, metadata: dict[str, Any]) -> None:
    """Write `state` into the existing, empty `folder`; collective over all ranks.

    `metadata` is stored with the checkpoint and given back by `read_metadata`.
    """
    strategy = FullyParallelSaveStrategyWrapper(
        _InProcessSave(), parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    dist_checkpointing.save(state, str(folder), sharded_strategy=strategy, content_metadata=metadata)


def read_metadata(folder: Path) -> dict[str, Any]:
    """What `write` stored beside the tensors; empty for a checkpoint of another program."""
    return dist_checkpointing.load_content_metadata(str(folder)) or {}


def read(state: ShardedStateDict, folder: Path, *, model_only: bool) -> dict[str, Any]:
    """`state` with its tensors read from `folder`, whatever layout wrote them; collective over all ranks.

    Raises ValueError where the checkpoint lacks tensors that are asked for, or holds model tensors that are not.
    """
    strategy = FullyParallelLoadStrategyWrapper(
        get_default_load_sharded_strategy(str(folder)),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    loaded, absent_here, absent_there = dist_checkpointing.load(
        state, str(folder), sharded_strategy=strategy, strict=StrictHandling.RETURN_ALL
    )
    left_over = sorted(key for key in absent_here if not any(part in key for part in _NOT_MODEL))
    missing = sorted(absent_there)
    if missing:
        raise ValueError(f"{folder} lacks {_listed(missing)}: it was saved from a model of another shape")
    if model_only and left_over:
        raise ValueError(f"{folder} holds {_listed(left_over)}, which this model has not: the model flags differ")
    return loaded


def _listed(keys: list[str]) -> str:
    shown = ", ".join(keys[:5])
    return shown if len(keys) <= 5 else f"{shown} and {len(keys) - 5} more"
