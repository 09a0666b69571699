"""Machines on this one, each with its own network, host name, shared memory and temporary folder, on one switch.

Every host name maps to 127.0.1.1, as on Debian. Needs root and the right to create network namespaces; `why_not`
reports what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ADDRESSES = ("10.77.31.1", "10.77.31.2", "10.77.31.3", "10.77.31.4")
LINK = "cable"  # the network interface of every machine
SHARED_MEMORY_SIZE = "2g"


@functools.cache
def why_not() -> str:
    """The reason why no such machines can be created here; empty if they can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if missing := [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]:
        return f"no {missing[0]} in the PATH"
    bridge = "ip link add name switch type bridge"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "sh", "-c", bridge], capture_output=True, text=True)
    return tried.stderr.strip()


class Machines:
    """Made by `machines`; machine i is at ADDRESSES[i]. The last of `keepers` holds the switch."""

    def __init__(self, keepers: list[subprocess.Popen], folder: Path, own_shared_memory: bool) -> None:
        self._keepers = keepers
        self._switch = len(keepers) - 1
        self.run(self._switch, "ip", "link", "add", "name", "switch", "type", "bridge")
        self.run(self._switch, "ip", "link", "set", "switch", "up")
        resolver = folder / "resolv.conf"  # one that answers at once that there is none
        resolver.write_text("nameserver 127.0.0.1\n")
        for number, address in enumerate(ADDRESSES[: self._switch]):
            hosts = folder / f"hosts{number}"
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 machine{number}\n")
            self.run(number, "hostname", f"machine{number}")
            self.run(number, "mount", "--bind", str(hosts), "/etc/hosts")
            self.run(number, "mount", "--bind", str(resolver), "/etc/resolv.conf")
            if own_shared_memory:
                self.run(number, "mount", "-t", "tmpfs", "-o", f"size={SHARED_MEMORY_SIZE}", "tmpfs", "/dev/shm")
            self.run(number, "ip", "link", "set", "lo", "up")
            peer = ["peer", "name", LINK, "netns", str(keepers[number].pid)]
            self.run(self._switch, "ip", "link", "add", f"port{number}", "type", "veth", *peer)
            self.run(self._switch, "ip", "link", "set", f"port{number}", "master", "switch", "up")
            self.run(number, "ip", "address", "add", f"{address}/24", "dev", LINK)
            self.run(number, "ip", "link", "set", LINK, "up")
            # packets to other networks are dropped by the switch, but Ray and others ask for the default route
            self.run(number, "ip", "route", "add", "default", "dev", LINK)

    def command(self, number: int, *words: str) -> list[str]:
        """A command line that runs `words` on machine `number`."""
        where = ["--target", str(self._keepers[number].pid), "--net", "--uts", "--mount"]
        return ["nsenter", *where, f"--wdns={os.getcwd()}", *words]

    def run(self, number: int, *words: str) -> str:
        """Runs a short command on a machine; returns its output."""
        done = subprocess.run(self.command(number, *words), check=True, timeout=30, stdout=subprocess.PIPE, text=True)
        return done.stdout

    def cut(self, number: int, state: str = "down") -> None:
        """Unplugs machine `number` from the switch, so that its packets are lost, or plugs it in again ("up")."""
        self.run(self._switch, "ip", "link", "set", f"port{number}", state)

    def throttle(self, number: int, rate: str) -> None:
        """Limits what machine `number` sends and receives, e.g. to "20mbit"."""
        shape = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
        self.run(number, "tc", "qdisc", "replace", "dev", LINK, *shape)
        self.run(self._switch, "tc", "qdisc", "replace", "dev", f"port{number}", *shape)

    def give_own_temporary_folder(self, number: int, shared: Path) -> None:
        """Replaces /tmp of machine `number` by an empty one, in which only the folder `shared` is as before."""
        script = (
            'mount --bind "$1" /mnt && mount -t tmpfs -o size=2g tmpfs /tmp && chmod 1777 /tmp && mkdir -p "$1"'
            ' && mount --bind /mnt "$1" && umount /mnt'
        )
        self.run(number, "sh", "-c", script, "sh", str(shared))


@contextlib.contextmanager
def machines(folder: Path, count: int, *, own_shared_memory: bool = True) -> Iterator[Machines]:
    """`count` machines; the test has to end the processes that still run on them. `folder` takes their hosts files."""
    with contextlib.ExitStack() as stack:
        keepers = []
        for _ in range(count + 1):
            command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", "echo; exec sleep 7200"]
            keeper = subprocess.Popen(command, stdout=subprocess.PIPE)
            stack.callback(keeper.wait)
            stack.callback(keeper.kill)
            keeper.stdout.readline()  # the namespaces exist
            keepers.append(keeper)
        yield Machines(keepers, folder, own_shared_memory)


def two_machines(folder: Path, *, own_shared_memory: bool = True) -> contextlib.AbstractContextManager[Machines]:
    """`machines` for two."""
    return machines(folder, 2, own_shared_memory=own_shared_memory)
