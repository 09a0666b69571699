"""Exports a Megatron model's weights as full Hugging Face tensors, gathered over every group that shards the model.

Every HF name is yielded exactly once, in the order of the parameter mapping, without vocabulary padding; a tied head is
omitted.

Collective. One row of the mapping is gathered at a time, so that there is never a second copy of the model. Only
receiving ranks get the full tensors; the others hold only what they must pass on. Each tensor takes two steps: a
broadcast over the pipeline and expert groups to the ranks that lack it, then a gather over its tensor-parallel group.
`GatherPlan` decides which of these steps are needed; its answers are the same on all ranks of a group.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slimrl.models.adapters import AdapterMapping
from slimrl.models.families import ModelMapping, ParamMapping
from slimrl.models.families.param_mapping import VALUE_HEAD_ROW, Layout
from slimrl.models.model_spec import ModelSpec
from slimrl.processes.files import listed
from slimrl.weights.adapters import merged_weights
from slimrl.weights.reshard import find, from_shards, global_tensors, local_shape
from slimrl.weights.update.buckets import BufferAllocator, ReusedBuffer
from slimrl.weights.update.topology import RankGroups

Group = dist.ProcessGroup | None


@dataclasses.dataclass(frozen=True)
class GatherPlan:
    """Which ranks of this rank's groups need shards; "dense" and "expert" are tensors outside and inside of experts.

    `by_stage` has for each rank of the pipeline group, and `by_expert_rank` for each rank of the expert group, whether
    that rank needs its shards: (dense, expert).
    """

    by_stage: tuple[tuple[bool, bool], ...]
    by_expert_rank: tuple[tuple[bool, bool], ...]
    receivers: frozenset[int] | None

    @classmethod
    def find(
        cls, receivers: Collection[int] | None, tp_group: Group, pp_group: Group, ep_group: Group, etp_group: Group
    ) -> GatherPlan:
        """Collective over the pipeline and expert groups; `receivers` are global ranks, None: all."""
        receiving = None if receivers is None else frozenset(receivers)
        needed = (_has_receiver(tp_group, receiving), _has_receiver(etp_group, receiving))
        by_expert_rank = gathered(needed, ep_group)
        # possibly only another rank of the expert group needs a shard of an expert
        needed = (needed[0], any(expert for _, expert in by_expert_rank))
        return cls(tuple(gathered(needed, pp_group)), tuple(by_expert_rank), receiving)

    def pp_broadcast_needed(self, stage: int, *, expert: bool) -> bool:
        """Whether a rank of this pipeline group other than that of `stage` needs the shard."""
        return any(need[expert] for number, need in enumerate(self.by_stage) if number != stage)

    def ep_broadcast_needed(self, expert_rank: int) -> bool:
        """Whether a rank of this expert group other than `expert_rank` needs the shard."""
        return any(need[True] for number, need in enumerate(self.by_expert_rank) if number != expert_rank)

    def receivers_in(self, group: Group) -> list[int]:
        """The group ranks of `group` that receive the full tensor; None is a group of this rank alone."""
        return [
            number for number, rank in enumerate(_members(group, self.receivers)) if _receives(rank, self.receivers)
        ]


_Value = TypeVar("_Value")


def gathered(value: _Value, group: Group) -> list[_Value]:
    """The values of all ranks of `group`, in rank order; collective."""
    if group is None or group.size() == 1:
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _members(group: Group, receivers: frozenset[int] | None) -> list[int]:
    """Global ranks of `group`; without `receivers` any number will do: exporting to all needs no torch.distributed."""
    if group is not None:
        return dist.get_process_group_ranks(group)
    return [0 if receivers is None else dist.get_rank()]


def _receives(rank: int, receivers: frozenset[int] | None) -> bool:
    return receivers is None or rank in receivers


def _has_receiver(group: Group, receivers: frozenset[int] | None) -> bool:
    return any(_receives(rank, receivers) for rank in _members(group, receivers))


class ExportGroups(TypedDict):
    """The groups that shard a model."""

    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    ep_group: dist.ProcessGroup
    etp_group: dist.ProcessGroup


def groups_of(parallel: RankGroups) -> ExportGroups:
    """The groups of a trainer rank, as `iter_hf_tensors` takes them."""
    return {
        "tp_group": parallel.tp_group,
        "pp_group": parallel.pp_group,
        "ep_group": parallel.ep_group,
        "etp_group": parallel.etp_group,
    }


@dataclasses.dataclass(frozen=True)
class _Owner:
    """Which ranks hold a tensor: its pipeline stage, and its expert-parallel rank if it is an expert's (else None)."""

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
    space: BufferAllocator | None = None,
    value_head: bool = False,
    merge_adapters: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yields (HF name, full tensor) of every weight, on the model's device and in its dtype.

    `model` is a bare GPTModel, or the model chunks of an interleaved stage. The groups are those of tensor, pipeline,
    expert and expert tensor parallelism; None means a size of 1. The tensors of a row are valid until that of the next
    row is requested and may share memory with the model: copy them to keep them. `space` is the memory for tensors that
    must be joined (default: private memory). Every rank of the groups must consume the whole iterator, which yields
    nothing on ranks not in `receivers` (global ranks; None: all). With `value_head` the model has one in place of an
    output layer, which is yielded as a classifier's. A `family` that is an `AdapterMapping` yields the adapters of the
    model; any other yields the weights, with the adapters merged unless `merge_adapters` is off. Raises ValueError, on
    every rank, for a tensor missing from the model or from the mapping.
    """
    tensors = global_tensors(model, adapters=isinstance(family, AdapterMapping))
    merged = merged_weights(model) if merge_adapters and not isinstance(family, AdapterMapping) else {}
    owners = _owners(tensors, pp_group, ep_group)
    if value_head:
        spec = dataclasses.replace(spec, tied=True)  # it has no output layer, as if that were the embedding
    mapped = [*family.rows(spec), *([VALUE_HEAD_ROW] if value_head else [])]
    rows = [(row, find(row, owners)) for row in mapped]
    check_complete(rows, owners, spec, family)
    device = next(iter(tensors.values())).device
    plan = GatherPlan.find(receivers, tp_group, pp_group, ep_group, etp_group)
    memory, parts = ReusedBuffer(device), _RowMemory(space or ReusedBuffer(device))
    for row, name in rows:
        assert name is not None  # checked by `check_complete`
        group = tp_group if row.expert is None else etp_group
        size = group.size() if group is not None and row.shard_dim is not None else 1
        local = merged[name]() if name in merged else tensors.get(name)
        if local is None:
            local = torch.empty(local_shape(row, spec, size=size), dtype=owners[name].dtype, device=device)
        local = local.detach()
        _broadcast(local, owners[name], plan, pp_group, ep_group)
        shards = _gather(local, group, size, plan, memory)
        if shards is None:
            continue
        if row.layout is Layout.PLAIN and row.shard_dim == 0:
            shards = shards.flatten(0, 1).unsqueeze(0)  # the concatenated shards are the full tensor
        parts.begin(shards)
        for part, tensor in zip(row.hf, from_shards(row, list(shards), spec, parts.empty), strict=True):
            yield part.name, tensor


def _owners(tensors: dict[str, Tensor], pp_group: Group, ep_group: Group) -> dict[str, _Owner]:
    """The owner of every tensor of the whole model, the same on all ranks of the groups."""
    local = {name: tensor.dtype for name, tensor in tensors.items()}
    stage: dict[str, tuple[int | None, torch.dtype]] = {}
    for rank, names in enumerate(gathered(local, ep_group)):
        stage |= {name: (rank if ".experts." in name else None, dtype) for name, dtype in names.items()}
    owners: dict[str, _Owner] = {}
    for number, on_stage in enumerate(gathered(stage, pp_group)):
        for name, (expert_rank, dtype) in on_stage.items():
            # names are unique: a tied last stage's copy of the embedding has a different name
            owners[name] = _Owner(number, expert_rank, dtype)
    return owners


def check_complete(
    rows: list[tuple[ParamMapping, str | None]], owners: Collection[str], spec: ModelSpec, family: ModelMapping
) -> None:
    """Raises ValueError unless each row has the name of one of the model's tensors, `owners`, and each tensor a row."""
    if missing := [row.megatron[0] for row, name in rows if name is None]:
        raise ValueError(
            f"the model has no {listed(missing)}, which a {family.model_type} model has: it was built from other"
            " flags, or is only one of several pipeline stages"
        )
    left_over = set(owners) - {name for _, name in rows}
    if spec.tied:
        left_over -= set(family.head.megatron)
    if left_over:
        raise ValueError(
            f"the model has {listed(left_over)}, but the parameter mapping of {family.model_type} has no Hugging Face"
            " name for it: the engines would keep its old values"
        )


def _broadcast(local: Tensor, owner: _Owner, plan: GatherPlan, pp_group: Group, ep_group: Group) -> None:
    """Fills `local` on ranks that need the tensor and lack it: over the pipeline group, then over the expert group.

    Of an expert's tensor, only ranks with the owner's expert rank take part in the first step, because stages may be on
    different machines.
    """
    expert_rank = owner.expert_rank
    is_expert = expert_rank is not None
    has_expert = not is_expert or ep_group is None or ep_group.rank() == owner.expert_rank
    if pp_group is not None and has_expert and plan.pp_broadcast_needed(owner.stage, expert=is_expert):
        dist.broadcast(local, group=pp_group, group_src=owner.stage)
    if expert_rank is not None and ep_group is not None and plan.ep_broadcast_needed(expert_rank):
        dist.broadcast(local, group=ep_group, group_src=expert_rank)


def _gather(local: Tensor, group: Group, size: int, plan: GatherPlan, memory: ReusedBuffer) -> Tensor | None:
    """[size, ...]: the tensors of all ranks of `group`, in rank order; None on a rank that does not receive them.

    Several tensors are gathered into `memory`.
    """
    receivers = plan.receivers_in(group)
    if size == 1 or group is None:
        return local.unsqueeze(0) if (0 if group is None else group.rank()) in receivers else None
    if not receivers:
        return None
    if len(receivers) == 1 and group.rank() not in receivers:
        dist.gather(local.contiguous(), group=group, group_dst=receivers[0])
        return None
    together = memory.take(size * local.nbytes).view(local.dtype).view(size, *local.shape)
    if len(receivers) == 1:
        dist.gather(local.contiguous(), list(together), group=group, group_dst=receivers[0])
    else:
        dist.all_gather_into_tensor(together.flatten(0, 1), local.contiguous(), group=group)
    return together if group.rank() in receivers else None


class _RowMemory:
    """Memory for the output tensors of one row at a time; those of a row are contiguous."""

    def __init__(self, buffer: BufferAllocator) -> None:
        self._buffer = buffer
        self._row = torch.empty(0)
        self._used = 0

    def begin(self, shards: Tensor) -> None:
        """Reuses the memory for the next row, which has as many elements as `shards`."""
        self._row, self._used = shards, 0

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """An uninitialised tensor, valid until the next row."""
        if not self._used:
            self._row = self._buffer.take(self._row.nbytes).view(self._row.dtype)
        start, self._used = self._used, self._used + math.prod(shape)
        return self._row[start : self._used].view(shape)
