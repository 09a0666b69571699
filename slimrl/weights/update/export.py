"""A Megatron model's weights as full Hugging Face tensors, gathered over every group that divides the model.

Every HF name comes exactly once, in the table's order, without vocabulary padding; a tied head is left out.

Collective. One row at a time is gathered, so that there is never a second copy of the model. Only receiving ranks get
the full tensors; the others hold only what they must pass on. A tensor takes two steps: broadcast along the pipeline
and among expert ranks to those that lack it, then a gather over its tensor-parallel group. `GatherPlan` decides which
of these are needed; all ranks of a group decide alike, because they have the same answers from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slimrl.models.families import ModelMapping, ParamMapping
from slimrl.models.families.param_mapping import Layout
from slimrl.models.model_spec import ModelSpec
from slimrl.weights.reshard import find, from_shards, global_tensors, listed, local_shape
from slimrl.weights.update.buckets import ReusedBuffer

Group = dist.ProcessGroup | None


@dataclasses.dataclass(frozen=True)
class GatherPlan:
    """What one rank knows; `dense` and `expert` are the tensors outside and inside of experts.

    `by_stage` has for each rank of the pipeline group, `by_expert_rank` for each of the expert group, whether it must
    come to hold its shard: (dense, expert).
    """

    by_stage: tuple[tuple[bool, bool], ...]
    by_expert_rank: tuple[tuple[bool, bool], ...]
    receivers: frozenset[int] | None

    @classmethod
    def find(
        cls, receivers: Collection[int] | None, tp_group: Group, pp_group: Group, ep_group: Group, etp_group: Group
    ) -> GatherPlan:
        """Collective over the pipeline and expert groups; `receivers` are global ranks, None: all."""
        wanted = None if receivers is None else frozenset(receivers)
        own = (_holds_receiver(tp_group, wanted), _holds_receiver(etp_group, wanted))
        by_expert_rank = gathered(own, ep_group)
        # a shard of an expert may be wanted only by another rank of the expert group
        own = (own[0], any(expert for _, expert in by_expert_rank))
        return cls(tuple(gathered(own, pp_group)), tuple(by_expert_rank), wanted)

    def pp_broadcast_needed(self, stage: int, *, expert: bool) -> bool:
        """Whether a rank of this pipeline group other than that of `stage` needs the shard."""
        return any(need[expert] for number, need in enumerate(self.by_stage) if number != stage)

    def ep_broadcast_needed(self, expert_rank: int) -> bool:
        """Whether a rank of this expert group other than `expert_rank` needs the shard."""
        return any(need[True] for number, need in enumerate(self.by_expert_rank) if number != expert_rank)

    def wanting(self, group: Group) -> list[int]:
        """The members of `group`, as its own ranks, that want the full tensor; None is a group of this rank alone."""
        return [number for number, rank in enumerate(_members(group, self.receivers)) if _wants(rank, self.receivers)]


_Value = TypeVar("_Value")


def gathered(value: _Value, group: Group) -> list[_Value]:
    """The values of all ranks of `group`, in its order; collective."""
    if group is None or group.size() == 1:
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _members(group: Group, receivers: frozenset[int] | None) -> list[int]:
    """Global ranks, which matter only where there are `receivers`: an export to all needs no torch.distributed."""
    if group is not None:
        return dist.get_process_group_ranks(group)
    return [0 if receivers is None else dist.get_rank()]


def _wants(rank: int, receivers: frozenset[int] | None) -> bool:
    return receivers is None or rank in receivers


def _holds_receiver(group: Group, receivers: frozenset[int] | None) -> bool:
    return any(_wants(rank, receivers) for rank in _members(group, receivers))


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a tensor lives: the pipeline stage, and the expert-parallel rank for those of an expert (else None)."""

    stage: int
    expert_rank: int | None
    dtype: torch.dtype


@torch.no_grad()
def iter_hf_tensors(
    model: nn.Module | Sequence[nn.Module],
    spec: ModelSpec,
    family: ModelMapping,
    tp_group: Group = None,
    *,
    pp_group: Group = None,
    ep_group: Group = None,
    etp_group: Group = None,
    receivers: Collection[int] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, full tensor) of every weight, on the model's device and in its dtype.

    `model` is a bare GPTModel, or the chunks of an interleaved stage. The groups are those of tensor, pipeline,
    expert and expert tensor parallelism; None stands for a size of 1. A yielded tensor is valid until the next one
    is asked for, and may share memory with the model: copy it to keep it. Every rank of the groups must consume the
    whole iterator, which is empty on those that are not among `receivers` (global ranks; None: all). Raises
    ValueError, on every rank, for a tensor missing from the model or left over.
    """
    tensors = global_tensors(model)
    places = _places(tensors, pp_group, ep_group)
    rows = [(row, find(row, places)) for row in family.rows(spec)]
    _check_complete(rows, places, spec, family)
    device = next(iter(tensors.values())).device
    needs = GatherPlan.find(receivers, tp_group, pp_group, ep_group, etp_group)
    memory, parts = ReusedBuffer(device), _RowMemory(device)
    for row, name in rows:
        assert name is not None  # `_check_complete` raises else
        group = tp_group if row.expert is None else etp_group
        size = group.size() if group is not None and row.shard_dim is not None else 1
        local = tensors.get(name)
        if local is None:
            local = torch.empty(local_shape(row, spec, size=size), dtype=places[name].dtype, device=device)
        local = local.detach()
        _bring(local, places[name], needs, pp_group, ep_group)
        shards = _gather(local, group, size, needs, memory)
        if shards is None:
            continue
        if row.layout is Layout.PLAIN and row.shard_dim == 0:
            shards = shards.flatten(0, 1).unsqueeze(0)  # they are in memory as the whole tensor does
        parts.begin(shards)
        for part, tensor in zip(row.hf, from_shards(row, list(shards), spec, parts.empty), strict=True):
            yield part.name, tensor


def _places(tensors: dict[str, Tensor], pp_group: Group, ep_group: Group) -> dict[str, _Place]:
    """The place of every tensor of the whole model, the same on all ranks of the groups."""
    own = {name: tensor.dtype for name, tensor in tensors.items()}
    stage: dict[str, tuple[int | None, torch.dtype]] = {}
    for rank, names in enumerate(gathered(own, ep_group)):
        stage |= {name: (rank if ".experts." in name else None, dtype) for name, dtype in names.items()}
    places: dict[str, _Place] = {}
    for number, held in enumerate(gathered(stage, pp_group)):
        for name, (expert_rank, dtype) in held.items():
            # the copy that a tied last stage keeps of the embedding has its own name: no name is held twice
            places[name] = _Place(number, expert_rank, dtype)
    return places


def _check_complete(
    rows: list[tuple[ParamMapping, str | None]], places: dict[str, _Place], spec: ModelSpec, family: ModelMapping
) -> None:
    if missing := [row.megatron[0] for row, name in rows if name is None]:
        raise ValueError(
            f"the model has no {listed(missing)}, which a {family.model_type} model has: it was built from other"
            " flags, or holds only one of several pipeline stages"
        )
    left_over = set(places) - {name for _, name in rows}
    if spec.tied:
        left_over -= set(family.head.megatron)
    if left_over:
        raise ValueError(
            f"the model has {listed(left_over)}, for which the table of {family.model_type} has no Hugging Face name:"
            " the engines would keep their old values of it"
        )


def _bring(local: Tensor, place: _Place, needs: GatherPlan, pp_group: Group, ep_group: Group) -> None:
    """Fills `local` on ranks that need the tensor and do not hold it: along the pipeline, then among expert ranks.

    Across stages, which may be on other machines, only the ranks that need it for the second step take part.
    """
    expert_rank = place.expert_rank
    of_expert = expert_rank is not None
    holds_expert = not of_expert or ep_group is None or ep_group.rank() == place.expert_rank
    if pp_group is not None and holds_expert and needs.pp_broadcast_needed(place.stage, expert=of_expert):
        dist.broadcast(local, group=pp_group, group_src=place.stage)
    if expert_rank is not None and ep_group is not None and needs.ep_broadcast_needed(expert_rank):
        dist.broadcast(local, group=ep_group, group_src=expert_rank)


def _gather(local: Tensor, group: Group, size: int, needs: GatherPlan, memory: ReusedBuffer) -> Tensor | None:
    """[size, ...]: the tensors of all ranks of `group`, in rank order; None on a rank that does not want them.

    They are in `memory` where there are several.
    """
    wanting = needs.wanting(group)
    if size == 1 or group is None:
        return local.unsqueeze(0) if (0 if group is None else group.rank()) in wanting else None
    if not wanting:
        return None
    if len(wanting) == 1 and group.rank() not in wanting:
        dist.gather(local.contiguous(), group=group, group_dst=wanting[0])
        return None
    together = memory.take(size * local.nbytes).view(local.dtype).view(size, *local.shape)
    if len(wanting) == 1:
        dist.gather(local.contiguous(), list(together), group=group, group_dst=wanting[0])
    else:
        dist.all_gather_into_tensor(together.flatten(0, 1), local.contiguous(), group=group)
    return together if group.rank() in wanting else None


class _RowMemory:
    """Memory for what the tensors of one row after another need; those of one row lie side by side."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = ReusedBuffer(device)
        self._row = torch.empty(0, device=device)
        self._used = 0

    def begin(self, shards: Tensor) -> None:
        """Gives the memory to the next row, which has the elements of `shards`."""
        self._row, self._used = shards, 0

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """A tensor of any content, until the next row."""
        if not self._used:
            self._row = self._buffer.take(self._row.nbytes).view(self._row.dtype)
        start, self._used = self._used, self._used + math.prod(shape)
        return self._row[start : self._used].view(shape)
