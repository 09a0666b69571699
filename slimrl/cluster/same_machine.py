"""Whether SGLang would take two nodes for one machine that are not: containers of one host with a common /dev/shm.

SGLang tells by a name in shared memory which of its processes are on one machine, and has these talk over loopback.
Nodes that share /dev/shm and not their network then wait for each other without a word.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Collection, Iterator, Sequence

from slimrl.processes import leftovers


@dataclasses.dataclass(frozen=True)
class NodeMark:
    """A node at `address`: the name of its mark in shared memory, and its network namespace."""

    address: str
    name: str
    network: int


@contextlib.contextmanager
def marked(address: str, shared_memory: str = leftovers.SHARED_MEMORY) -> Iterator[NodeMark]:
    """Puts a mark into this node's shared memory, for as long as others look for it."""
    with leftovers.owned_folder("slimrl-node-", shared_memory) as folder:
        yield NodeMark(address, folder.name, _network())


def _network() -> int:
    """The network namespace by its number; 0 where there are none."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except FileNotFoundError:
        return 0


def seen_of(marks: Sequence[NodeMark], shared_memory: str = leftovers.SHARED_MEMORY) -> set[str]:
    """The names of the marks that are in this node's shared memory."""
    return {mark.name for mark in marks if os.path.isdir(os.path.join(shared_memory, mark.name))}


def taken_for_one(marks: Sequence[NodeMark], seen: Sequence[Collection[str]]) -> str | None:
    """Why these nodes cannot hold one server, as a sentence; None where they can. `seen[i]` is what node i sees."""
    for place, own in enumerate(marks):
        for other in marks[:place]:
            if other.name in seen[place] and other.network != own.network:
                return (
                    f"the nodes {other.address} and {own.address} share /dev/shm and not their network, as containers"
                    " of one host may do: SGLang takes them for one machine and would wait for ever; give each a"
                    " /dev/shm of its own (no --ipc=host, no common volume), or both the host's network"
                )
    return None
