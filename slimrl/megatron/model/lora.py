"""Linear layers with LoRA adapters, for every parallel layout; their weight is frozen, only A and B are trained.

A column-parallel layer divides B by rows and copies A; a row-parallel layer divides A by columns and copies B. What is
exchanged between tensor-parallel ranks has the width of the rank of the adapters, not that of the model:

| layer | without sequence parallelism | with it |
| --- | --- | --- |
| column | backward: all-reduce of the gradient of A x | all-gather of A x, backward: reduce-scatter |
| row | all-reduce of A x | reduce-scatter of A x, backward: all-gather |

The copies see all tokens without sequence parallelism, so that their gradients are equal on all ranks; with it each
rank has the gradient of its tokens, and megatron-core sums those of parameters marked `sequence_parallel`. Nothing is
exchanged by the projections to the latent vectors of latent attention (MLA), which are whole on every rank, A and B as
well. Nor by experts in the forward pass: with expert tensor parallelism all its ranks have the same tokens, and the
dispatcher adds what their parts of an expert give, B A x of a row-parallel layer included. The gradient of a copy is
then a part on each rank, and these are summed in the backward pass. Used by `model_builder`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import functional as F

from slimrl.megatron.model.attention import PackedLatentAttention, WholeLinear
from slimrl.models.adapters import PART_OF_NAME, AdapterConfig
from slimrl.weights.adapters import AdaptedLinear, Adapter

_CHILD = PART_OF_NAME.strip(".") + "."


class _Adapted(AdaptedLinear):
    """What both kinds have in common; the class beside it in the bases is megatron-core's."""

    config: TransformerConfig
    tp_group: Any
    sequence_parallel: bool
    is_expert: bool
    divided: str | None  # the tensor that tensor parallelism divides

    def attach(self, layer: str, settings: AdapterConfig) -> None:
        """Adds the adapters of `layer`, a key of `PROJECTIONS`, and freezes the weight."""
        self.scale = settings.scale
        self.widths = _widths(settings.projections(layer), self.config, self.weight.shape[0])
        self.adapters = torch.nn.ModuleDict(
            {
                name: Adapter(settings.rank, self.weight.shape[1], self.widths[name], self.weight)
                for name in settings.of_layer(layer)
            }
        )
        tensor: Any
        for name, tensor in self.adapters.named_parameters():
            # those of experts count on every rank, like the weight
            if self.is_expert or name.rpartition(".")[2] == self.divided:
                # of copies of an expert's tensor, one counts in the norm of the gradient
                tensor.shared = name.rpartition(".")[2] != self.divided and self.tp_group.rank() > 0
                set_tensor_model_parallel_attributes(tensor, True, 0 if self.divided == "lora_B" else 1, 1)
            else:
                tensor.sequence_parallel = self.sequence_parallel

    def join(self, outputs: Any) -> Tensor:
        """Queries, keys and values lie by key-value group."""
        if len(outputs) < 3:
            return super().join(outputs)
        groups = self.widths["k_proj"] // self.config.kv_channels
        return torch.cat([one.unflatten(-1, (groups, -1)) for one in outputs], dim=-1).flatten(-2)

    def added(self, x: Tensor, complete: Callable[[Tensor], Tensor]) -> Tensor:
        """scale * B A x, [..., outputs]; `complete` exchanges A x of all adapters, [..., rank * adapters]."""
        pairs = {name: self._summing(*adapter()) for name, adapter in self.adapters.items()}
        compressed = complete(F.linear(x, torch.cat([a for a, _ in pairs.values()])))
        parts = dict(zip(pairs, compressed.chunk(len(pairs), dim=-1), strict=True))
        outputs = [
            F.linear(parts[name], pairs[name][1])
            if name in parts
            else compressed.new_zeros(*compressed.shape[:-1], width)
            for name, width in self.widths.items()
        ]
        return self.join(outputs) * self.scale

    def _summing(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """A and B of an expert whose copy has the sum of the gradients of all expert-tensor-parallel ranks."""
        if not self.is_expert or self.tp_group.size() == 1:
            return a, b
        if self.divided == "lora_B":
            return copy_to_tensor_model_parallel_region(a, group=self.tp_group), b
        return a, copy_to_tensor_model_parallel_region(b, group=self.tp_group)

    def base_state(self, save: Callable[..., ShardedStateDict], prefix: str, *rest: Any) -> ShardedStateDict:
        """megatron-core's entries and those of the adapters, which it would take for copies."""
        entries = save(prefix, *rest)
        offsets, metadata = rest
        own = {name: tensor for name, tensor in self.state_dict(keep_vars=True).items() if name.startswith(_CHILD)}
        axis = 0 if self.divided == "lora_B" else 1
        return {name: entry for name, entry in entries.items() if not name.startswith(prefix + _CHILD)} | (
            make_sharded_tensors_for_checkpoint(
                own,
                prefix,
                {name: axis for name in own if name.rpartition(".")[2] == self.divided},
                offsets,
                tp_group=self.tp_group,
                dp_cp_group=metadata["dp_cp_group"],
            )
        )


def _widths(names: Sequence[str], config: TransformerConfig, outputs: int) -> dict[str, int]:
    """Rows of a rank's weight, by projection."""
    if len(names) == 3:  # queries, keys and values
        assert config.num_query_groups is not None
        keys = outputs // (config.num_attention_heads // config.num_query_groups + 2)
        return dict(zip(names, (outputs - 2 * keys, keys, keys), strict=True))
    return {name: outputs // len(names) for name in names}


class AdaptedColumnLinear(_Adapted, ColumnParallelLinear):
    """megatron-core's column-parallel layer with adapters."""

    divided = "lora_B"

    def __init__(self, *args: Any, layer: str, adapters: AdapterConfig, **settings: Any):
        ColumnParallelLinear.__init__(self, *args, **settings)
        self.attach(layer, adapters)

    def forward(self, input_: Tensor, *args: Any, **settings: Any) -> tuple[Tensor, Tensor | None]:
        """As megatron-core's: [tokens, batch, outputs of this rank] and the bias to add."""
        output, bias = ColumnParallelLinear.forward(self, input_, *args, **settings)
        if not self.enabled:
            return output, bias
        return output + self.added(input_, self._complete), bias

    def _complete(self, compressed: Tensor) -> Tensor:
        if self.is_expert or self.tp_group.size() == 1:
            return compressed
        gather = (
            gather_from_sequence_parallel_region if self.sequence_parallel else copy_to_tensor_model_parallel_region
        )
        return gather(compressed, group=self.tp_group)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> ShardedStateDict:
        """The entries of the layer and of its adapters."""
        save = super(_Adapted, self).sharded_state_dict
        return self.base_state(save, prefix, sharded_offsets, metadata)


class AdaptedRowLinear(_Adapted, RowParallelLinear):
    """megatron-core's row-parallel layer with adapters."""

    divided = "lora_A"

    def __init__(self, *args: Any, layer: str, adapters: AdapterConfig, **settings: Any):
        RowParallelLinear.__init__(self, *args, **settings)
        self.attach(layer, adapters)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """As megatron-core's: [tokens, batch, outputs] and the bias to add."""
        output, bias = RowParallelLinear.forward(self, input_)
        if not self.enabled:
            return output, bias
        return output + self.added(input_, self._complete), bias

    def _complete(self, compressed: Tensor) -> Tensor:
        if self.is_expert or self.tp_group.size() == 1:
            return compressed
        scatters = self.sequence_parallel
        reduce = reduce_scatter_to_sequence_parallel_region if scatters else reduce_from_tensor_model_parallel_region
        return reduce(compressed, group=self.tp_group)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> ShardedStateDict:
        """The entries of the layer and of its adapters."""
        save = super(_Adapted, self).sharded_state_dict
        return self.base_state(save, prefix, sharded_offsets, metadata)


class AdaptedWholeLinear(_Adapted, WholeLinear):
    """A projection to a latent vector with an adapter; each rank has all of both, and its part of the tokens."""

    divided = None
    is_expert = False

    def __init__(self, config: MLATransformerConfig, output_size: int, *, layer: str, adapters: AdapterConfig):
        WholeLinear.__init__(self, config, output_size)
        self.config = config
        self.sequence_parallel = config.sequence_parallel
        self.attach(layer, adapters)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """As `WholeLinear`."""
        output, bias = WholeLinear.forward(self, x)
        return (output + self.added(x, lambda compressed: compressed) if self.enabled else output), bias


_KINDS = {
    "linear_qkv": AdaptedColumnLinear,
    "linear_q_proj": AdaptedColumnLinear,
    "linear_q_up_proj": AdaptedColumnLinear,
    "linear_kv_up_proj": AdaptedColumnLinear,
    "linear_proj": AdaptedRowLinear,
    "linear_fc1": AdaptedColumnLinear,
    "linear_fc2": AdaptedRowLinear,
}
_TO_LATENTS = ("linear_q_down_proj", "linear_kv_down_proj")


def add_adapters(block: TransformerBlockSubmodules, settings: AdapterConfig | None) -> TransformerBlockSubmodules:
    """`block`, whose layers are megatron-core's local ones, with adapters in its linear layers; None adds nothing."""
    if settings is None:
        return block
    layers = {id(layer): _adapted(layer, settings) for layer in block.layer_specs or ()}
    return dataclasses.replace(block, layer_specs=[layers[id(layer)] for layer in block.layer_specs or ()])


def _adapted(layer: ModuleSpec, settings: AdapterConfig) -> ModuleSpec:
    submodules = layer.submodules
    assert submodules is not None
    attention, mlp = submodules.self_attention, submodules.mlp
    if isinstance(mlp.submodules, MoESubmodules):
        experts, shared = (_linear(one, settings) for one in (mlp.submodules.experts, mlp.submodules.shared_experts))
        mlp = dataclasses.replace(
            mlp, submodules=dataclasses.replace(mlp.submodules, experts=experts, shared_experts=shared)
        )
    else:
        mlp = _linear(mlp, settings)
    attention = _to_latents(_linear(attention, settings), settings)
    changed = dataclasses.replace(submodules, self_attention=attention, mlp=mlp)
    return dataclasses.replace(layer, submodules=changed)


def _linear(block: ModuleSpec, settings: AdapterConfig) -> ModuleSpec:
    """Attention or MLP with the layers that have targets replaced."""
    found = {
        name: ModuleSpec(module=kind, params={"layer": name, "adapters": settings})
        for name, kind in _KINDS.items()
        if hasattr(block.submodules, name) and settings.of_layer(name)
    }
    return dataclasses.replace(block, submodules=dataclasses.replace(block.submodules, **found))


def _to_latents(attention: ModuleSpec, settings: AdapterConfig) -> ModuleSpec:
    """Latent attention with adapters in its projections to the latents, which `PackedLatentAttention` makes itself."""
    if not issubclass(attention.module, PackedLatentAttention):
        return attention
    made = {
        name: functools.partial(AdaptedWholeLinear, layer=name, adapters=settings)
        for name in _TO_LATENTS
        if settings.of_layer(name)
    }
    return dataclasses.replace(attention, params={**attention.params, "down_projections": made})
