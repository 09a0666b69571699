"""The device memory of NCCL communicators, given back while a training rank sleeps.

A communicator keeps buffers on its GPU for as long as it lives: hundreds of MiB for each group of ranks. NCCL 2.29.7
and later can suspend one, which keeps its identity and its connections, so that nothing that holds the group has to
learn of a new one; torch offers that as a method of the backend. Older ones keep their buffers, and the log says so.
Gloo holds sockets and host memory: there is nothing to give back. Called by `offload`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state

SUSPENDS_SINCE = (2, 29, 7)

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """What this needs of `torch.distributed`'s backends; both calls are collective over the backend's ranks."""

    def suspend(self) -> None: ...

    def resume(self) -> None: ...


class Communicators:
    """The communicators of one rank, in an order that is the same on all ranks that share them."""

    def __init__(self, backends: Iterable[Backend]) -> None:
        self._backends = list(backends)

    def suspend(self) -> None:
        """Gives their device memory back; no collective may run until `resume`. Collective over all ranks."""
        for backend in self._backends:
            backend.suspend()

    def resume(self) -> None:
        """Takes the memory again. Collective over all ranks."""
        for backend in self._backends:
            backend.resume()


def open_communicators(device: torch.device) -> Communicators:
    """Every NCCL communicator of Megatron's groups that can be suspended; none on the CPU."""
    if device.type != "cuda":
        return Communicators([])
    version = torch.cuda.nccl.version()
    if version < SUSPENDS_SINCE:
        logger.warning(
            "NCCL %s keeps the memory of its communicators while training sleeps: %s and later give it back",
            ".".join(map(str, version)),
            ".".join(map(str, SUSPENDS_SINCE)),
        )
        return Communicators([])
    return Communicators(distinct_backends(_groups(), device))


def distinct_backends(groups: Iterable[dist.ProcessGroup], device: torch.device) -> list[Backend]:
    """The backend of each group for `device`, each once; groups of one rank have no connections and are left out."""
    found: dict[int, Backend] = {}
    for group in groups:
        if group.size() > 1:
            backend = group._get_backend(device)
            found[id(backend)] = backend
    return list(found.values())


def _groups() -> list[dist.ProcessGroup]:
    """Megatron's own list, in the order in which the groups were made, which no rank can change."""
    made = parallel_state._global_process_group_list or []
    return [dist.group.WORLD if group is None else group for group in made]
