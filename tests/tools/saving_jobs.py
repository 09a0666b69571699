"""Run in a separate process by the tests of the converter to torch_dist: its save, and megatron-core's."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Model:
    """A model's flags, its Hugging Face folder, and the destinations of its two checkpoints."""

    flags: tuple[str, ...]
    hf: Path
    by_megatron: Path
    by_converter: Path


def save_both(rank: int, world_size: int, init_method: str, models: list[Model]) -> None:
    """Saves each model twice: loaded and saved by megatron-core, and without the model by the converter."""
    from slimrl.arguments import read_args
    from slimrl.megatron import parallel
    from slimrl.megatron.checkpoint import state as checkpoint
    from slimrl.megatron.checkpoint.state import model_blueprint
    from slimrl.megatron.model.model_builder import build_model
    from slimrl.models.families import family_for
    from slimrl.models.model_spec import ModelSpec
    from slimrl.weights.convert.hf_to_megatron import hf_to_torch_dist, load_hf_checkpoint
    from slimrl.weights.hf_checkpoint import read_hf_config

    for model in models:
        args, problems = read_args(model.flags, entry="convert_hf_to_torch_dist.py")
        assert not problems, problems
        family, shape = family_for(read_hf_config(model.hf)), ModelSpec.from_args(args)
        state = parallel.initialize(args, rank=0, world_size=1, init_method="tcp://127.0.0.1:0")
        try:
            built = build_model(args, state)
            load_hf_checkpoint(built, shape, family, model.hf)
            checkpoint.save_model_only(built, model.by_megatron)
        finally:
            parallel.shutdown()
        hf_to_torch_dist(
            model.hf, model.by_converter, shape, family, functools.partial(model_blueprint, args), max_file_bytes=20000
        )


def read_everything(folder: Path) -> dict[str, Any]:
    """Every entry of a checkpoint by key, read with torch's own loader: full tensors, unpickled objects."""
    import torch
    import torch.distributed.checkpoint as torch_checkpoint
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = torch_checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in entries.items()
    }
    torch_checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    return state
