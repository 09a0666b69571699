"""The device memory of NCCL communicators, given back while a training rank sleeps.

A communicator keeps buffers on its GPU for as long as it lives: hundreds of MiB for each group of ranks. NCCL 2.29.7
and later can suspend one, which keeps its identity and its connections, so that nothing that holds the group has to
learn of a new one; torch offers that as a method of the backend. Whether that is done is a decision of
`slimrl.platform.decisions`; where it is not, the log says why. Gloo holds sockets and host memory: there is nothing to
give back. Called by `offload`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slimrl.platform.decisions import keeps_communicators
from slimrl.platform.machine import this_machine

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """What this needs of `torch.distributed`'s backends; both calls are collective over the backend's ranks."""

    def _is_initialized(self) -> bool: ...

    def suspend(self) -> None: ...

    def resume(self) -> None: ...


class Communicators:
    """The communicators of one rank, in an order that is the same on all ranks that share them."""

    def __init__(self, backends: Iterable[Backend]) -> None:
        self._backends = list(backends)
        self._suspended: list[Backend] = []

    def suspend(self) -> None:
        """Gives their device memory back; no collective may run until `resume`. Collective over all ranks.

        A communicator is made by the first collective of its group, on all of the group's ranks: a group without one
        has nothing to give, and asking it would fail.
        """
        self._suspended = [backend for backend in self._backends if backend._is_initialized()]
        for backend in self._suspended:
            backend.suspend()

    def resume(self) -> None:
        """Takes the memory of those suspended again. Collective over all ranks."""
        for backend in self._suspended:
            backend.resume()
        self._suspended = []


def open_communicators(device: torch.device, *, suspends: bool, paired_stages: bool) -> Communicators:
    """Every NCCL communicator of Megatron's groups that is to be suspended with the rank; none on the CPU.

    `suspends` is --offload-train-nccl; with `paired_stages` virtual pipeline stages exchange in pairs.
    """
    if device.type != "cuda":
        return Communicators([])
    why = keeps_communicators(this_machine(), os.environ, suspends=suspends, paired_stages=paired_stages)
    if why is not None:
        logger.warning("the memory of NCCL communicators stays on the device while training is offloaded: %s", why)
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
