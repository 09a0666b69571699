"""Which ranks need which tensors during an export, so that nothing is brought or gathered where nobody wants it.

An export has two steps for each tensor: it is brought along the pipeline and among expert ranks to those that do not
hold it, and then the shards of a tensor-parallel group become the full tensor. Every rank of a group computes the same
decisions, because all of them have the same answers of that group. Called by the exporter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch.distributed as dist

Group = dist.ProcessGroup | None


@dataclasses.dataclass(frozen=True)
class Needs:
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
    ) -> Needs:
        """Collective over the pipeline and expert groups; `receivers` are global ranks, None: all."""
        wanted = None if receivers is None else frozenset(receivers)
        own = tuple(_holds_receiver(group, wanted) for group in (tp_group, etp_group))
        by_expert_rank = gathered(own, ep_group)
        # a shard of an expert may be wanted only by another rank of the expert group
        own = (own[0], any(expert for _, expert in by_expert_rank))
        return cls(tuple(gathered(own, pp_group)), tuple(by_expert_rank), wanted)

    def along_pipeline(self, stage: int, *, expert: bool) -> bool:
        """Whether a rank of this pipeline group other than that of `stage` needs the shard."""
        return any(need[expert] for number, need in enumerate(self.by_stage) if number != stage)

    def among_experts(self, expert_rank: int) -> bool:
        """Whether a rank of this expert group other than `expert_rank` needs the shard."""
        return any(need[True] for number, need in enumerate(self.by_expert_rank) if number != expert_rank)

    def wanting(self, group: Group) -> list[int]:
        """The members of `group`, as its own ranks, that want the full tensor; None is a group of this rank alone."""
        return [number for number, rank in enumerate(_members(group, self.receivers)) if _wants(rank, self.receivers)]


def gathered(value: object, group: Group) -> list:
    """The values of all ranks of `group`, in its order; collective."""
    if group is None or group.size() == 1:
        return [value]
    values: list = [None] * group.size()
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
