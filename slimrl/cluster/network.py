"""The addresses that the processes of a run listen on.

A run on one node listens on loopback only. A run on several nodes, or with an external server or router on another
machine, listens on the node's address. The driver decides this once, when it places the run on GPUs.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
from collections.abc import Mapping, Sequence

import psutil

from slimrl.arguments import Arguments
from slimrl.engines.protocol import EngineError
from slimrl.platform.launch_env import network_environment, network_of

LOOPBACK = "127.0.0.1"
WILDCARDS = ("0.0.0.0", "::", "")


@dataclasses.dataclass(frozen=True)
class BindConfig:
    """`nodes` is the number of Ray nodes; `partner` an external server or router host on another machine, or None."""

    nodes: int = 1
    partner: str | None = None

    @property
    def one_machine(self) -> bool:
        """Whether all connections stay on this machine."""
        return self.nodes == 1 and self.partner is None

    def address(self, node_ip: str) -> str:
        """The listen address on the node whose address in Ray is `node_ip`."""
        if self.one_machine:
            return LOOPBACK
        if self.partner is not None and is_loopback(node_ip):  # Ray itself is local
            return source_address(self.partner)
        return node_ip

    def environment(self, node_ip: str, inherited: Mapping[str, str]) -> dict[str, str]:
        """Variables of every actor that bind gloo and NCCL to the run's listen address, except those `inherited`.

        By default both choose another interface. Empty on several nodes, where each node sets its own.
        """
        if self.nodes > 1:
            return {}
        return network_environment(network_of(self.address(node_ip)), inherited)

    def local_address(self) -> str:
        """The listen address on this process's node."""
        return self.address(node_address())


def node_address() -> str:
    """The address of this node in Ray."""
    import ray  # here, because the ranks import this module and need no Ray

    return ray.util.get_node_ip_address()


def bind_config(args: Arguments) -> BindConfig:
    """From the flags and the joined cluster."""
    import ray

    return BindConfig(sum(node["Alive"] for node in ray.nodes()), partner_of(args))


def partner_of(args: Arguments) -> str | None:
    """The first external server or router host of the flags that is another machine; None if there is none."""
    hosts = [address.rpartition(":")[0].strip("[]") for address in args.rollout_external_engine_addrs or ()]
    hosts += [args.sglang_router_ip] if args.sglang_router_ip is not None else []
    return next((host for host in hosts if not is_this_machine(host)), None)


def is_loopback(address: str) -> bool:
    """Whether it is an address of the loopback interface."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_this_machine(host: str) -> bool:
    """Whether `host` is this machine; false for an unknown name."""
    try:
        found = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {one.address.partition("%")[0] for held in psutil.net_if_addrs().values() for one in held}
    return all(is_loopback(address) or address in own for address in found)


def source_address(host: str) -> str:
    """This machine's source address towards `host`; sends nothing. Raises EngineError if there is no route."""
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


def server_host(listens_on: str | None, address: str, nodes: Sequence[str] = ()) -> str:
    """The host for calls to a server: `listens_on` as set by the user, or `address` if unset or a wildcard.

    Raises EngineError if `listens_on` is one address and the servers are on several `nodes`.
    """
    if listens_on is None or listens_on in WILDCARDS:
        return address
    if len(set(nodes)) > 1:
        raise EngineError(
            f"--sglang-host {listens_on} is on one node, and the servers are on {len(set(nodes))}: leave it out, so"
            " that each listens on its own node's address, or give 0.0.0.0"
        )
    return listens_on
