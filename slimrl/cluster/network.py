"""The addresses that the processes of a run listen on, and the check for nodes that SGLang would take for one machine.

A run on one node listens on loopback alone. A run on several nodes, or with an external server or router on another
machine, listens on the node's own address. The driver decides this once, when it places the run on GPUs.
SGLang finds out by a name in shared memory which of its processes are on one machine, and connects these over loopback.
Containers of one host that share /dev/shm and not their network would wait for each other without a message.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence

import psutil
import ray

from slimrl.arguments import Arguments
from slimrl.engines.protocol import EngineError
from slimrl.platform.launch_env import network_environment, network_of
from slimrl.processes import stale_resources

LOOPBACK = "127.0.0.1"
WILDCARDS = ("0.0.0.0", "::", "")


@dataclasses.dataclass(frozen=True)
class Reach:
    """`nodes` that are in the Ray cluster; `partner` is a host of the user's that is another machine, None without."""

    nodes: int = 1
    partner: str | None = None

    @property
    def one_machine(self) -> bool:
        """Whether nobody outside of this machine has to reach anything."""
        return self.nodes == 1 and self.partner is None

    def address(self, node_ip: str) -> str:
        """Where processes listen on the node whose address in Ray is `node_ip`."""
        if self.one_machine:
            return LOOPBACK
        if self.partner is not None and is_loopback(node_ip):  # Ray itself needs to be reached by nobody else
            return source_address(self.partner)
        return node_ip

    def environment(self, node_ip: str, inherited: Mapping[str, str]) -> dict[str, str]:
        """Variables of every actor that bind gloo and NCCL to where the run listens, but for those that are set.

        Left to themselves both take another interface. Nothing where each node has an address of its own: it knows it.
        """
        if self.nodes > 1:
            return {}
        return network_environment(network_of(self.address(node_ip)), inherited)

    def here(self) -> str:
        """The same on this process's node."""
        return self.address(node_address())


def node_address() -> str:
    """The address of this node in Ray."""
    return ray.util.get_node_ip_address()


def reach_of(args: Arguments) -> Reach:
    """By the flags and the cluster that is joined."""
    return Reach(sum(node["Alive"] for node in ray.nodes()), partner_of(args))


def partner_of(args: Arguments) -> str | None:
    """The first host of the flags that runs a server or router of the user's and is another machine."""
    hosts = [address.rpartition(":")[0].strip("[]") for address in args.rollout_external_engine_addrs or ()]
    hosts += [args.sglang_router_ip] if args.sglang_router_ip is not None else []
    return next((host for host in hosts if not is_here(host)), None)


def is_loopback(address: str) -> bool:
    """Whether it is an address of the loopback interface."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_here(host: str) -> bool:
    """Whether `host` is this machine; a name that nobody knows is not."""
    try:
        found = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {one.address.partition("%")[0] for held in psutil.net_if_addrs().values() for one in held}
    return all(is_loopback(address) or address in own for address in found)


def source_address(host: str) -> str:
    """This machine's address as `host` sees it; nothing is sent. Raises EngineError where no way leads there."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(
            f"{host} (--sglang-router-ip or --rollout-external-engine-addrs) cannot be reached from this machine:"
            f" {error}"
        ) from error


def called_at(listens_on: str | None, address: str, nodes: Sequence[str] = ()) -> str:
    """The host at which a server is called that listens where the user said, or at `address` where that is nowhere.

    Raises EngineError where the user's host cannot be on each of several `nodes`.
    """
    if listens_on is None or listens_on in WILDCARDS:
        return address
    if len(set(nodes)) > 1:
        raise EngineError(
            f"--sglang-host {listens_on} is on one node, and the servers are on {len(set(nodes))}: leave it out, so"
            " that each listens on its own node's address, or give 0.0.0.0"
        )
    return listens_on


@dataclasses.dataclass(frozen=True)
class NodeMark:
    """A node at `address`: the name of its mark in shared memory, and its network namespace."""

    address: str
    name: str
    network: int


@contextlib.contextmanager
def marked(address: str, shared_memory: str = stale_resources.SHARED_MEMORY) -> Iterator[NodeMark]:
    """Puts a mark into this node's shared memory, for as long as others look for it."""
    with stale_resources.owned_folder("slimrl-node-", shared_memory) as folder:
        yield NodeMark(address, folder.name, _network())


def _network() -> int:
    """The network namespace by its number; 0 where there are none."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except FileNotFoundError:
        return 0


def seen_of(marks: Sequence[NodeMark], shared_memory: str = stale_resources.SHARED_MEMORY) -> set[str]:
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
