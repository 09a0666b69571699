"""The checkpoint contents that megatron-core would store for a model, computed without memory for its weights.

Returns the keys, shapes, dtypes and blocks of `sharded_state_dict` for any layer spec: the model is built, but its
weights have no values, and nothing is put on a GPU. A checkpoint is the same with and without Transformer Engine, so
megatron-core's own layers are used. Called by the converter to torch_dist, which fills in the values one by one.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import (
    _CONTENT_METADATA_KEY,
    get_default_save_common_strategy,
)
from torch import Tensor
from torch.overrides import TorchFunctionMode

from slimrl.arguments import Arguments
from slimrl.megatron import parallel
from slimrl.megatron.model.model_builder import CustomModel, build_model
from slimrl.weights.convert.torch_dist_writer import Blueprint, Piece, Weight

_FACTORIES = (
    *(torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn),
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like),
)
_INITIALISERS = (torch.nn.init.normal_, torch.Tensor.normal_)  # nothing to fill; skipping them saves their overhead


class _WithoutMemory(TorchFunctionMode):
    """Creates every new tensor on the meta device, even if the caller names a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _INITIALISERS:
            return args[0] if args else kwargs["tensor"]
        if func in _FACTORIES:
            kwargs["device"] = torch.device("meta")
            kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def model_blueprint(args: Arguments, folder: Path | None = None) -> Blueprint:
    """The contents of a checkpoint of the model of `args`, as if one process saved it.

    Opens and closes torch.distributed and megatron-core's groups for this process alone. `args` must have no
    parallelism; --transformer-impl is ignored. If `folder` is given, also writes megatron-core's own small files of a
    checkpoint into it.
    """
    # Transformer Engine (--spec may build its layers) allocates meta weights on the GPU, unless disabled
    args = dataclasses.replace(args, transformer_impl="local", init_model_with_meta_device=True)
    # a private store: with an address torch would use torchrun's store, where no other process connects
    state = parallel.initialize(args, rank=0, world_size=1, init_method=dist.HashStore())
    try:
        with _WithoutMemory():
            model = build_model(
                args, dataclasses.replace(state, device=torch.device("meta")), CustomModel.from_args(args)
            )
        stored = model.sharded_state_dict()
        if folder is not None:
            get_default_save_common_strategy().save_common({_CONTENT_METADATA_KEY: {"content": "model"}}, folder)
            save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    finally:
        parallel.shutdown()
    weights = tuple(_weight(name, entry) for name, entry in stored.items() if not isinstance(entry, ShardedObject))
    return Blueprint(weights, _objects([entry for entry in stored.values() if isinstance(entry, ShardedObject)]))


def _weight(name: str, entry: ShardedTensor | ShardedTensorFactory) -> Weight:
    if isinstance(entry, ShardedTensorFactory):
        blocks = _built(entry)
        return Weight(name, tuple(map(_piece, blocks)), _cut_like(entry))
    return Weight(name, (_piece(entry),), lambda values: [values])


def _built(factory: ShardedTensorFactory) -> list[ShardedTensor]:
    built = factory.build()
    return [built] if isinstance(built, ShardedTensor) else list(nested_values(built))


def _cut_like(factory: ShardedTensorFactory) -> Callable[[Tensor], Sequence[Tensor]]:
    """The factory's split, applied to real values."""
    return lambda values: [block.data for block in _built(dataclasses.replace(factory, data=values))]


def _piece(block: ShardedTensor) -> Piece:
    """Prepended axes (layers, experts) have length 1 in a block."""
    return Piece(
        key=block.key,
        offsets=tuple(block.global_offset),
        sizes=(1,) * block.prepend_axis_num + tuple(block.local_shape),
        full=tuple(block.global_shape),
        dtype=block.dtype,
    )


def _objects(entries: list[ShardedObject]) -> dict[str, bytes]:
    """megatron-core stores an object as a list of one."""
    objects = {}
    for entry in entries:
        buffer = io.BytesIO()
        torch.save([entry.data], buffer)
        objects[entry.unique_key] = buffer.getvalue()
    return objects
