"""Which trainer rank sends weights to which engine, computed from GPUs and nodes alike on every trainer rank.

GPU numbers start at the trainer's first GPU; GPU n belongs to trainer rank n if that rank exists. An engine may span
several nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from slimrl.engines.backend import SGLANG

if TYPE_CHECKING:
    import torch
    from torch import distributed as dist


class RankGroups(Protocol):
    """The process groups of a training rank that a weight update uses; `megatron.parallel.ParallelState` is one."""

    @property
    def rank(self) -> int:
        """Global rank of this process."""

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""

    @property
    def device(self) -> torch.device:
        """Device of the rank's weights."""

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
    """One server: its URL and its GPUs, one per rank, with the tensor-parallel ranks of the first pipeline stage first.

    `nodes` has the name of each GPU's node; without it, all engines are on one machine. `tensor_parallel_size` defaults
    to the number of GPUs. `life` counts the server's restarts, possibly at the same URL. `key` is its API key, `engine`
    its row in `engines.backend`.
    """

    url: str
    gpus: Sequence[int]
    nodes: Sequence[str] | None = None
    tensor_parallel_size: int | None = None
    life: int = 0
    key: str | None = dataclasses.field(default=None, repr=False)
    engine: str = SGLANG

    @property
    def node_of(self) -> dict[int, str]:
        """The node of each GPU."""
        return dict(zip(self.gpus, self.nodes or [""] * len(self.gpus), strict=True))

    @property
    def tensor_parallel(self) -> int:
        """Number of ranks that shard each tensor."""
        return self.tensor_parallel_size or len(self.gpus)

    @property
    def has_stages(self) -> bool:
        """Whether the engine has pipeline stages."""
        return self.tensor_parallel < len(self.gpus)


@dataclasses.dataclass(frozen=True)
class SenderMap:
    """Which trainer ranks send to each engine, by index of the engine.

    `sharing` has, for each rank of an engine, the trainer rank that shares its memory with it. `remote` are the engines
    without shared memory.
    """

    sharing: dict[int, tuple[int, ...]]
    remote: tuple[int, ...]

    @property
    def senders(self) -> set[int]:
        """All trainer ranks that send to an engine."""
        ranks = {rank for senders in self.sharing.values() for rank in senders}
        return ranks | ({0} if self.remote else set())


def split_senders(engines: Sequence[EngineEndpoint]) -> SenderMap:
    """Senders if no engine shares a GPU with the trainer: rank 0 sends to all. Raises as `check_without_stages`."""
    check_without_stages(engines)
    return SenderMap({}, tuple(range(len(engines))))


def colocated_senders(engines: Sequence[EngineEndpoint], world_size: int, *, host_memory: bool) -> SenderMap:
    """Senders if the trainer and the engines share GPUs.

    Every process of a node can open the host memory of one rank: on each node of an engine, the engine's first trainer
    rank there sends to all of its ranks, and rank 0 sends to the ranks on its own node that have no trainer. Device
    memory can be opened on its own GPU only: each GPU's trainer rank sends to that GPU. An engine with a rank that no
    trainer rank can reach this way is remote. Raises ValueError for a remote engine with pipeline stages, or on the GPU
    of rank 0.
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
    """For each GPU of the engine a trainer rank on the same node, or None."""
    ranks: dict[str, int] = {}
    for gpu, node in engine.node_of.items():
        if gpu < world_size:
            ranks.setdefault(node, gpu)
    for other in engines:
        if 0 in other.gpus:
            ranks.setdefault(other.node_of[0], 0)
    return [ranks.get(node) for node in engine.node_of.values()]


def check_without_stages(engines: Sequence[EngineEndpoint]) -> None:
    """Raises ValueError for an engine with pipeline stages, which can receive weights through shared memory only.

    SGLang 0.5.20 assigns the ranks of every stage the same ranks in a broadcast, and acknowledges a file when the first
    stage has read it and later stages have not.
    """
    for engine in engines:
        if engine.has_stages:
            raise ValueError(
                f"engine {engine.url} has pipeline stages, which take weights only from trainers on their own GPUs:"
                " leave --sglang-pp-size out, or give --colocate and training GPUs for all engines"
            )


def export_ranks(rank: int, groups: Sequence[Sequence[int]]) -> set[int]:
    """The ranks that must export weights together with `rank`: all that are linked to it by a chain of `groups`.

    `groups` are the tensor, pipeline, expert and expert tensor parallel groups of every rank.
    """
    found: set[int] = set()
    reached = {rank}
    while reached - found:
        found = set(reached)
        reached |= {member for group in groups if found & set(group) for member in group}
    return found
