"""TCP ports for servers, chosen so that nobody takes them between the choice and the bind seconds later.

Two dangers, two answers. Other slimrl processes: a claimed port is marked by an abstract Unix socket of that number,
which lives in the same network namespace as the port and vanishes with its process, however that ends. Everybody else:
ports below the kernel's ephemeral range are never handed out for outgoing connections or for port 0.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

EPHEMERAL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT = 20000  # below lie the ports of Ray's workers (10002 to 19999) and of well-known services
ATTEMPTS = 2000


class PortReservation:
    """`count` neighbouring ports, from `first` on, held until `release` or the end of this process."""

    def __init__(self, first: int, markers: list[socket.socket]) -> None:
        self.first = first
        self._markers = markers

    def release(self) -> None:
        """Lets others choose the ports again. May be called twice."""
        while self._markers:
            self._markers.pop().close()


def claim_ports(count: int = 1, host: str = "127.0.0.1") -> PortReservation:
    """Claims `count` neighbouring ports that are free on `host` and on all addresses. Raises OSError if none are."""
    highest = _first_ephemeral_port() - count
    for _ in range(ATTEMPTS):
        claim = _try_claim(random.randint(LOWEST_PORT, highest), count, host)
        if claim is not None:
            return claim
    raise OSError(f"no {count} free neighbouring ports on {host} between {LOWEST_PORT} and {highest + count}")


def claim_port(port: int, host: str) -> PortReservation:
    """Claims one port that the user chose. Raises OSError where another program or slimrl process has it."""
    claim = _try_claim(port, 1, host)
    if claim is None:
        raise OSError(f"port {port} on {host} is taken: give another one or end the program that listens there")
    return claim


def _first_ephemeral_port() -> int:
    try:
        first = int(EPHEMERAL_RANGE_FILE.read_text().split()[0])
    except OSError:
        return 32768  # Linux's default
    return first if first > LOWEST_PORT + 1000 else 65536


def _try_claim(first: int, count: int, host: str) -> PortReservation | None:
    markers: list[socket.socket] = []
    claim = PortReservation(first, markers)
    for port in range(first, first + count):
        marker = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        markers.append(marker)
        try:
            marker.bind(f"\0slimrl-port-{port}")
            _check_free(port, host)
        except OSError:
            claim.release()
            return None
    return claim


def _check_free(port: int, host: str) -> None:
    """Raises OSError where something is bound to the port (or the host is not ours)."""
    for address in {socket.gethostbyname(host), "0.0.0.0"}:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do: TIME_WAIT is no obstacle
            probe.bind((address, port))
