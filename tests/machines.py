"""Two machines on this one, each with its own network and a host name that maps to 127.0.1.1, connected by a link.

Needs root and the right to create network namespaces; `why_not` reports what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ADDRESSES = ("10.77.31.1", "10.77.31.2")


@functools.cache
def why_not() -> str:
    """The reason why no such machines can be created here; empty if they can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if missing := [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]:
        return f"no {missing[0]} in the PATH"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    return tried.stderr.strip()


class Machines:
    """Made by `two_machines`; the first is at ADDRESSES[0], the second at ADDRESSES[1]."""

    def __init__(self, keepers: list[subprocess.Popen], folder: Path, own_shared_memory: bool) -> None:
        self._keepers = keepers
        for number, address in enumerate(ADDRESSES):
            hosts = folder / f"hosts{number}"
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 machine{number}\n")
            self.run(number, "hostname", f"machine{number}")
            self.run(number, "mount", "--bind", str(hosts), "/etc/hosts")
            if own_shared_memory:
                self.run(number, "mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", "/dev/shm")
            self.run(number, "ip", "link", "set", "lo", "up")
            if number == 0:
                peer = ["peer", "name", "cable", "netns", str(keepers[1].pid)]
                self.run(0, "ip", "link", "add", "cable", "type", "veth", *peer)
            self.run(number, "ip", "address", "add", f"{address}/24", "dev", "cable")
            self.run(number, "ip", "link", "set", "cable", "up")

    def command(self, number: int, *words: str) -> list[str]:
        """A command line that runs `words` on machine `number`."""
        where = ["--target", str(self._keepers[number].pid), "--net", "--uts", "--mount"]
        return ["nsenter", *where, f"--wdns={os.getcwd()}", *words]

    def run(self, number: int, *words: str) -> None:
        """Runs a short command on a machine."""
        subprocess.run(self.command(number, *words), check=True, timeout=30)

    def cut(self, number: int, state: str = "down") -> None:
        """Disconnects machine `number`, or reconnects it ("up")."""
        self.run(number, "ip", "link", "set", "cable", state)


@contextlib.contextmanager
def two_machines(folder: Path, *, own_shared_memory: bool = True) -> Iterator[Machines]:
    """The machines; the test has to end the processes that still run on them."""
    with contextlib.ExitStack() as stack:
        keepers = []
        for _ in range(2):
            command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", "echo; exec sleep 3600"]
            keeper = subprocess.Popen(command, stdout=subprocess.PIPE)
            stack.callback(keeper.wait)
            stack.callback(keeper.kill)
            keeper.stdout.readline()  # the namespaces exist
            keepers.append(keeper)
        yield Machines(keepers, folder, own_shared_memory)
