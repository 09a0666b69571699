"""A Megatron model's weights as full Hugging Face tensors, gathered over tensor-parallel ranks.

Promises every HF name exactly once, in the order of the forward pass, without vocabulary padding; a tied
head is left out. Collective over the tensor-parallel group: each of its ranks gets the full tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slimrl.weights.families import Family
from slimrl.weights.layout import from_shards
from slimrl.weights.megatron_names import find, global_parameters
from slimrl.weights.names import listed
from slimrl.weights.shape import ModelShape


@torch.no_grad()
def iter_hf_tensors(
    model: nn.Module, shape: ModelShape, family: Family, tp_group: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, full tensor) of every weight, on the model's device and in its dtype.

    `model` is a bare GPTModel that holds all layers (one pipeline stage). A yielded tensor is valid until the
    next one is asked for, and may share memory with the model: copy it to keep it. Every rank of `tp_group`
    must consume the whole iterator. Raises ValueError for a parameter missing from the model or left over.
    """
    parameters = global_parameters(model)
    for row in family.rows(shape.num_layers, tied=shape.tied):
        name = find(row, parameters)
        if name is None:
            raise ValueError(
                f"the model has no {row.megatron[0]}, which a {family.model_type} model has: it was built from other"
                " flags, or holds only one of several pipeline stages"
            )
        shards = _gather(parameters.pop(name).detach(), tp_group if row.shard_dim is not None else None)
        for part, tensor in zip(row.hf, from_shards(row, shards, shape), strict=True):
            yield part.name, tensor
    if parameters:
        raise ValueError(
            f"the model has {listed(parameters)}, for which the table of {family.model_type} has no Hugging Face name:"
            " the engines would keep their old values of it"
        )


def _gather(local: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """The tensors of all ranks of `group`, in rank order."""
    if group is None or group.size() == 1:
        return [local]
    local = local.contiguous()
    gathered = local.new_empty(group.size(), *local.shape)
    dist.all_gather(list(gathered), local, group=group)
    return list(gathered)
