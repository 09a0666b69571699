"""What a node has, as data: what the launch decisions are taken from.

Promises that a description never changes. `decisions` and the engines' own tables of decisions take a `Machine`; none
of them asks torch, the environment or the file system itself.
"""

from __future__ import annotations

import dataclasses
import os

import psutil


@dataclasses.dataclass(frozen=True)
class Network:
    """How other nodes reach this one: the address under which Ray knows it, and the interface that holds it.

    Both are "" where that is not known.
    """

    address: str = ""
    interface: str = ""


@dataclasses.dataclass(frozen=True)
class Machine:
    """One node. `gpus` and `cores` count what processes on it may use; `nccl` is the version of torch's NCCL."""

    cuda: bool
    gpus: int = 0
    cores: int = 1
    nccl: tuple[int, ...] = ()
    network: Network = Network()


def this_machine() -> Machine:
    """The node of this process, as torch and the installed packages describe it."""
    import torch  # here, because an actor that only starts a rank describes its node without torch

    cuda = torch.cuda.is_available()
    return Machine(
        cuda=cuda,
        gpus=torch.cuda.device_count() if cuda else 0,
        cores=usable_cores(),
        nccl=tuple(torch.cuda.nccl.version()) if cuda else (),
    )


def network_of(address: str) -> Network:
    """The network of this node, whose address is `address`; without an interface where none holds it."""
    for interface, held in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in held):
            return Network(address, interface)
    return Network(address)


def usable_cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0))
