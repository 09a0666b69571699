"""A Megatron model's weights as full Hugging Face tensors, gathered over every group that divides the model.

Promises every HF name exactly once, in the order of the table, without vocabulary padding; a tied head is left out.
Collective: each rank of the groups gets the full tensors, one row at a time, so that no second copy of the model is
held anywhere. Called by the weight updater and by whoever saves Hugging Face files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slimrl.weights.families import Family, Row
from slimrl.weights.layout import from_shards, local_shape
from slimrl.weights.megatron_names import find, global_tensors
from slimrl.weights.names import listed
from slimrl.weights.shape import ModelShape

Group = dist.ProcessGroup | None


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a tensor lives: the pipeline stage, and the expert-parallel rank for those of an expert (else None)."""

    stage: int
    expert_rank: int | None
    dtype: torch.dtype


@torch.no_grad()
def iter_hf_tensors(
    model: nn.Module | Sequence[nn.Module],
    shape: ModelShape,
    family: Family,
    tp_group: Group = None,
    *,
    pp_group: Group = None,
    ep_group: Group = None,
    etp_group: Group = None,
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, full tensor) of every weight, on the model's device and in its dtype.

    `model` is a bare GPTModel, or the chunks of an interleaved stage. The groups are those of tensor, pipeline,
    expert and expert tensor parallelism; None stands for a size of 1. A yielded tensor is valid until the next one
    is asked for, and may share memory with the model: copy it to keep it. Every rank of the groups must consume the
    whole iterator. Raises ValueError, on every rank, for a tensor missing from the model or left over.
    """
    tensors = global_tensors(model)
    places = _places(tensors, pp_group, ep_group)
    rows = [(row, find(row, places)) for row in family.rows(shape)]
    _check_complete(rows, places, shape, family)
    device = next(iter(tensors.values())).device
    for row, name in rows:
        group = tp_group if row.expert is None else etp_group
        size = group.size() if group is not None and row.shard_dim is not None else 1
        local = tensors.get(name)
        if local is None:
            local = torch.empty(local_shape(row, shape, size=size), dtype=places[name].dtype, device=device)
        local = local.detach()
        _bring(local, places[name], pp_group, ep_group)
        for part, tensor in zip(row.hf, from_shards(row, _gather(local, group, size), shape), strict=True):
            yield part.name, tensor


def _places(tensors: dict[str, Tensor], pp_group: Group, ep_group: Group) -> dict[str, _Place]:
    """The place of every tensor of the whole model, the same on all ranks of the groups."""
    own = {name: tensor.dtype for name, tensor in tensors.items()}
    stage: dict[str, tuple[int | None, torch.dtype]] = {}
    for rank, names in enumerate(_all_gather_object(own, ep_group)):
        stage |= {name: (rank if ".experts." in name else None, dtype) for name, dtype in names.items()}
    places: dict[str, _Place] = {}
    for number, held in enumerate(_all_gather_object(stage, pp_group)):
        for name, (expert_rank, dtype) in held.items():
            # the copy that a tied last stage keeps of the embedding has its own name: no name is held twice
            places[name] = _Place(number, expert_rank, dtype)
    return places


def _check_complete(
    rows: list[tuple[Row, str | None]], places: dict[str, _Place], shape: ModelShape, family: Family
) -> None:
    if missing := [row.megatron[0] for row, name in rows if name is None]:
        raise ValueError(
            f"the model has no {listed(missing)}, which a {family.model_type} model has: it was built from other"
            " flags, or holds only one of several pipeline stages"
        )
    left_over = set(places) - {name for _, name in rows}
    if shape.tied:
        left_over -= set(family.head.megatron)
    if left_over:
        raise ValueError(
            f"the model has {listed(left_over)}, for which the table of {family.model_type} has no Hugging Face name:"
            " the engines would keep their old values of it"
        )


def _bring(local: Tensor, place: _Place, pp_group: Group, ep_group: Group) -> None:
    """Fills `local` on ranks that do not hold the tensor: first along the pipeline, then among expert ranks.

    Across stages, which may be on other machines, only the ranks that need it for the second step take part.
    """
    holds_expert = place.expert_rank is None or ep_group is None or ep_group.rank() == place.expert_rank
    if pp_group is not None and pp_group.size() > 1 and holds_expert:
        dist.broadcast(local, group=pp_group, group_src=place.stage)
    if place.expert_rank is not None and ep_group is not None and ep_group.size() > 1:
        dist.broadcast(local, group=ep_group, group_src=place.expert_rank)


def _gather(local: Tensor, group: Group, size: int) -> list[Tensor]:
    """The tensors of all ranks of `group`, in rank order."""
    if size == 1:
        return [local]
    gathered = local.new_empty(size, *local.shape)
    dist.all_gather(list(gathered), local.contiguous(), group=group)
    return list(gathered)


def _all_gather_object(value: object, group: Group) -> list:
    if group is None or group.size() == 1:
        return [value]
    gathered: list = [None] * group.size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered
