"""Who sends to which engine: pure arithmetic on GPUs and nodes, the same on every trainer rank.

GPUs count from the trainer's first; GPU n belongs to trainer rank n where there is such a rank. An engine may be on
several nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import distributed as dist


class RankGroups(Protocol):
    """What a weight update asks of a training rank's place; `slimrl.megatron.parallel.ParallelState` is one."""

    @property
    def rank(self) -> int:
        """Of this process among all trainers."""

    @property
    def world_size(self) -> int:
        """Number of trainers."""

    @property
    def device(self) -> torch.device:
        """Where its weights are."""

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """Tensor parallel."""

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """Pipeline parallel."""

    @property
    def ep_group(self) -> dist.ProcessGroup:
        """Expert parallel."""

    @property
    def etp_group(self) -> dist.ProcessGroup:
        """Tensor parallel within experts."""


@dataclasses.dataclass(frozen=True)
class EngineEndpoint:
    """One server: its URL and its GPUs, one per rank: all tensor-parallel ranks of the first pipeline stage first.

    `nodes` has the node of each GPU, by any name; left out, all engines are on one machine. `tensor_parallel_size`
    left out is the number of GPUs. `life` counts how often another server took this place, maybe at the same URL.
    `key` is what it asks for in every call.
    """

    url: str
    gpus: Sequence[int]
    nodes: Sequence[str] | None = None
    tensor_parallel_size: int | None = None
    life: int = 0
    key: str | None = dataclasses.field(default=None, repr=False)

    @property
    def node_of(self) -> dict[int, str]:
        """The node of each GPU."""
        return dict(zip(self.gpus, self.nodes or [""] * len(self.gpus), strict=True))

    @property
    def tensor_parallel(self) -> int:
        """Ranks that divide each tensor among them."""
        return self.tensor_parallel_size or len(self.gpus)

    @property
    def has_stages(self) -> bool:
        """Whether the engine's layers are divided into pipeline stages."""
        return self.tensor_parallel < len(self.gpus)


@dataclasses.dataclass(frozen=True)
class SenderMap:
    """`sharing` has, by number of the engine, the trainer rank that shares its memory with each rank of the engine.

    `remote` are the engines that share none.
    """

    sharing: dict[int, tuple[int, ...]]
    remote: tuple[int, ...]

    @property
    def senders(self) -> set[int]:
        """Every trainer rank that sends to some engine."""
        ranks = {rank for senders in self.sharing.values() for rank in senders}
        return ranks | ({0} if self.remote else set())


def split_roles(engines: Sequence[EngineEndpoint]) -> SenderMap:
    """No engine shares a GPU with the trainer: rank 0 sends to all. Raises ValueError as `check_without_stages`."""
    check_without_stages(engines)
    return SenderMap({}, tuple(range(len(engines))))


def colocated_roles(engines: Sequence[EngineEndpoint], world_size: int, *, host_memory: bool) -> SenderMap:
    """Who sends where GPUs are shared.

    Host memory of one rank can be opened by every process of its node: on each of an engine's nodes its first trainer
    rank serves all of the engine's ranks there, and rank 0 those on its node that have no trainer. Device memory is
    opened on its own GPU only: each GPU's rank serves that GPU. An engine with a rank that nobody can serve so counts
    as remote. Raises ValueError where that is an engine with pipeline stages, or one on the GPU of rank 0.
    """
    sharing: dict[int, tuple[int, ...]] = {}
    remote: list[int] = []
    for number, engine in enumerate(engines):
        senders = _on_node(engines, engine, world_size) if host_memory else engine.gpus
        present = tuple(rank for rank in senders if rank is not None and rank < world_size)
        if len(present) == len(senders):
            sharing[number] = present
        elif 0 in engine.gpus and not host_memory:
            raise ValueError(
                f"engine {engine.url} has GPUs {list(engine.gpus)} and the trainer has {world_size}: a GPU cannot"
                " be the source and a receiver of one broadcast; make --rollout-num-gpus-per-engine divide the number"
                " of training GPUs"
            )
        else:
            remote.append(number)
    check_without_stages([engines[number] for number in remote])
    return SenderMap(sharing, tuple(remote))


def _on_node(engines: Sequence[EngineEndpoint], engine: EngineEndpoint, world_size: int) -> list[int | None]:
    """For each GPU of the engine a trainer rank on the same node, None where there is none."""
    ranks: dict[str, int] = {}
    for gpu, node in engine.node_of.items():
        if gpu < world_size:
            ranks.setdefault(node, gpu)
    for other in engines:
        if 0 in other.gpus:
            ranks.setdefault(other.node_of[0], 0)
    return [ranks.get(node) for node in engine.node_of.values()]


def check_without_stages(engines: Sequence[EngineEndpoint]) -> None:
    """Raises ValueError for an engine with pipeline stages, to which weights go through shared memory only.

    SGLang 0.5.20 gives the ranks of every stage the same places in a broadcast, and answers when the first stage has
    read a file that later ones are still to read.
    """
    for engine in engines:
        if engine.has_stages:
            raise ValueError(
                f"engine {engine.url} has pipeline stages, which take weights only from trainers on their own GPUs:"
                " leave --sglang-pp-size out, or give --colocate and training GPUs for all engines"
            )


def partners(rank: int, groups: Sequence[Sequence[int]]) -> set[int]:
    """The ranks that must export weights together with `rank`: all that some chain of `groups` links to it.

    `groups` are those that divide the model, of every rank: tensor, pipeline, expert and expert tensor parallel.
    """
    found: set[int] = set()
    reached = {rank}
    while reached - found:
        found = set(reached)
        reached |= {member for group in groups if found & set(group) for member in group}
    return found
