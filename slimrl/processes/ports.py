"""Reserves TCP ports for servers, so that no other process takes them before the server binds them seconds later.

Against other slimrl processes: an abstract Unix socket named after the port marks a reservation; it is in the port's
network namespace and disappears with its process. Against other programs: reserved ports are below the kernel's
ephemeral range, which it uses for outgoing connections and for port 0.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

EPHEMERAL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT = 20000  # above the ports of Ray's workers (10002 to 19999) and of well-known services
ATTEMPTS = 2000


class PortReservation:
    """`count` consecutive ports from `first` on, reserved until `release` or the end of this process."""

    def __init__(self, first: int, markers: list[socket.socket]) -> None:
        self.first = first
        self._markers = markers

    def release(self) -> None:
        """Releases the ports. May be called twice."""
        while self._markers:
            self._markers.pop().close()


def claim_ports(count: int = 1, host: str = "127.0.0.1") -> PortReservation:
    """Reserves `count` consecutive ports that are free on `host` and on all addresses. Raises OSError if none are."""
    highest = _first_ephemeral_port() - count
    for _ in range(ATTEMPTS):
        reservation = _try_reserve(random.randint(LOWEST_PORT, highest), count, host)
        if reservation is not None:
            return reservation
    raise OSError(f"no {count} free consecutive ports on {host} between {LOWEST_PORT} and {highest + count}")


def claim_port(port: int, host: str) -> PortReservation:
    """Reserves one port chosen by the user. Raises OSError if another program or slimrl process has it."""
    reservation = _try_reserve(port, 1, host)
    if reservation is None:
        raise OSError(f"port {port} on {host} is taken: give another one or end the program that listens there")
    return reservation


def _first_ephemeral_port() -> int:
    try:
        first = int(EPHEMERAL_RANGE_FILE.read_text().split()[0])
    except OSError:
        return 32768  # Linux's default
    return first if first > LOWEST_PORT + 1000 else 65536


def _try_reserve(first: int, count: int, host: str) -> PortReservation | None:
    markers: list[socket.socket] = []
    reservation = PortReservation(first, markers)
    for port in range(first, first + count):
        marker = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        markers.append(marker)
        try:
            marker.bind(f"\0slimrl-port-{port}")
            _check_free(port, host)
        except OSError:
            reservation.release()
            return None
    return reservation


def _check_free(port: int, host: str) -> None:
    """Raises OSError if a socket is bound to the port, or `host` is not an address of this machine."""
    for address in {socket.gethostbyname(host), "0.0.0.0"}:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do: allows TIME_WAIT
            probe.bind((address, port))
