"""Saves and loads what a training worker needs to go on exactly where it stood.

Promises atomic checkpoints (see `checkpoint_folder`) that any parallel layout can read. Called by the trainer
(model, optimizer, schedule, random state, data position) and by the converters (model only).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt import GPTModel

from slimrl.megatron import checkpoint_folder, checkpoint_io
from slimrl.megatron.checkpoint_folder import CheckpointFolder, find_checkpoint

__all__ = ["CheckpointFolder", "find_checkpoint", "load_model_only", "save_model_only"]


def model_state(model: GPTModel, metadata: dict[str, Any]) -> ShardedStateDict:
    """The model's tensors, each with its place in the whole."""
    return model.sharded_state_dict(metadata=metadata)


def save_model_only(model: GPTModel, folder: Path) -> Path:
    """Write the model as the converted checkpoint `folder/release`; collective. Returns that folder.

    Only the vocabulary's padding depends on the layout that wrote it, and loading fits it anew.
    """
    root = Path(folder)
    partial = _begin(root, None)
    checkpoint_io.write({"model": model_state(model, {})}, partial, {"content": "model"})
    return _commit(root, None)


def load_model_only(model: GPTModel, folder: Path, step: int | None = None) -> CheckpointFolder:
    """Fill `model` from the checkpoint in `folder` (a checkpoint's root or its own folder); collective.

    Optimizer and other state there is left alone. Raises FileNotFoundError where there is no checkpoint,
    ValueError where its tensors are not those of this model.
    """
    found = find_checkpoint(folder, step)
    if found is None:
        raise FileNotFoundError(
            f"{folder} holds no checkpoint ({checkpoint_folder.TRACKER_NAME} is missing): convert the model with"
            " tools/convert_hf_to_torch_dist.py or give another folder"
        )
    loaded = checkpoint_io.read({"model": model_state(model, {})}, found.path, model_only=True)
    model.load_state_dict(loaded["model"])
    return found


def _begin(root: Path, iteration: int | None) -> Path:
    if dist.get_rank() == 0:
        checkpoint_folder.begin(root, iteration)
    dist.barrier()
    return checkpoint_folder.partial_path(root, iteration)


def _commit(root: Path, iteration: int | None) -> Path:
    dist.barrier()
    if dist.get_rank() == 0:
        checkpoint_folder.commit(root, iteration)
    dist.barrier()
    return root / checkpoint_folder.folder_name(iteration)
