"""Who sends to which engine: pure arithmetic on slot numbers, the same on every trainer rank.

Slots count from the trainer's first; slot n belongs to trainer rank n where there is such a rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class EngineEndpoint:
    """One server: its URL and its slots, one per rank: all tensor-parallel ranks of the first pipeline stage first.

    `nodes` has the node of each slot, by any name; left out, all engines are on one machine. `tensor_parallel_size`
    left out is the number of slots.
    """

    url: str
    slots: Sequence[int]
    nodes: Sequence[str] | None = None
    tensor_parallel_size: int | None = None

    @property
    def node_of(self) -> dict[int, str]:
        """The node of each slot."""
        return dict(zip(self.slots, self.nodes or [""] * len(self.slots), strict=True))

    @property
    def tensor_parallel(self) -> int:
        """Ranks that divide each tensor among them."""
        return self.tensor_parallel_size or len(self.slots)


@dataclasses.dataclass(frozen=True)
class Roles:
    """By number of the engine: the trainer ranks that share memory with it; and the engines that share none."""

    sharing: dict[int, tuple[int, ...]]
    remote: tuple[int, ...]

    @property
    def senders(self) -> set[int]:
        """Every trainer rank that sends to some engine."""
        ranks = {rank for members in self.sharing.values() for rank in members}
        return ranks | ({0} if self.remote else set())


def split_roles(engines: Sequence[EngineEndpoint]) -> Roles:
    """No engine shares a slot with the trainer: rank 0 sends to all."""
    return Roles({}, tuple(range(len(engines))))


def colocated_roles(engines: Sequence[EngineEndpoint], world_size: int, *, host_memory: bool) -> Roles:
    """Who sends where slots are shared.

    Host memory of one rank can be opened by every process of the machine: the rank on the engine's first
    slot serves all of its ranks, and rank 0 serves engines on slots without a trainer. Device memory is
    opened on its own GPU only: each slot's rank serves that slot, and engines elsewhere count as remote.
    Raises ValueError for an engine that lies only partly on the trainer's slots, rank 0's among them.
    """
    sharing: dict[int, tuple[int, ...]] = {}
    remote: list[int] = []
    for number, engine in enumerate(engines):
        shared = tuple(slot for slot in engine.slots if slot < world_size)
        if host_memory:
            sharing[number] = shared[:1] or (0,)
        elif len(shared) == len(engine.slots):
            sharing[number] = shared
        elif 0 in shared:
            raise ValueError(
                f"engine {engine.url} has slots {list(engine.slots)} and the trainer has {world_size}: a GPU cannot"
                " be the source and a receiver of one broadcast; make --rollout-num-gpus-per-engine divide the number"
                " of training slots"
            )
        else:
            remote.append(number)
    return Roles(sharing, tuple(remote))


def partners(rank: int, groups: Sequence[Sequence[int]]) -> set[int]:
    """The ranks that must export weights together with `rank`: all that some chain of `groups` links to it.

    `groups` are those that divide the model, of every rank: tensor, pipeline, expert and expert tensor parallel.
    """
    found, reached = set(), {rank}
    while reached - found:
        found = set(reached)
        reached |= {member for group in groups if found & set(group) for member in group}
    return found
