"""A long-lived child process: its ports, start, wait until ready, watch, end. Used for ranks, servers and the router.

Guarantees: no descendant outlives `stop` or this process, however it ends (see `subreaper`); all output is in one log
file; a child that dies while this process waits for it is reported at once, with its exit code and last log lines.

`claim_ports` reserves TCP ports for a server, so that no other process takes them before the server binds them seconds
later. Against other slimrl processes: an abstract Unix socket named after the port marks a reservation; it is in the
port's network namespace and disappears with its process. Against other programs: reserved ports are below the kernel's
ephemeral range, which it uses for outgoing connections and for port 0.

`importable` and `uncollected` are for the imports of a child that runs Python.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import slimrl
from slimrl.processes import stale_resources

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


SUBREAPER = Path(__file__).with_name("subreaper.py")
POLL_INTERVAL_S = 0.05
KILL_TIMEOUT_S = 15.0
LOG_TAIL_BYTES = 64 * 1024


class ProcessStartError(RuntimeError):
    """A child died or did not become ready in time."""


class ManagedProcess:
    """One child process below its subreaper.

    `name` is used in messages ("SGLang server http://..."). `environment` is added to this process's own.
    `shared_memory_prefixes` are the prefixes of the child's files in /dev/shm, which are removed with it. `pass_fds`
    are open file descriptors that it inherits under the same numbers.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        shared_memory_prefixes: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.log_path = Path(log_path)
        self._command = list(command)
        self._environment = {**os.environ, **(environment or {})}
        self._prefixes = list(shared_memory_prefixes)
        self._pass_fds = tuple(pass_fds)
        self._subreaper: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def start(self) -> None:
        """Starts the child; appends its output to the log. Raises RuntimeError if it runs already.

        First removes what killed processes of this user left on this machine.
        """
        if self._subreaper is not None and self._subreaper.poll() is None:
            raise RuntimeError(f"{self.name} is already running")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        stale_resources.remove_stale()
        prefixes = [word for prefix in self._prefixes for word in ("--shared-memory-prefix", prefix)]
        isolated = [sys.executable, "-I", "-S", str(SUBREAPER)]
        with open(self.log_path, "ab") as log:
            self._log_start = log.tell()
            self._subreaper = subprocess.Popen(
                [*isolated, "--parent", str(os.getpid()), *prefixes, "--", *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                pass_fds=self._pass_fds,
                process_group=0,  # Ctrl-C must reach only the driver, which stops its children in order
            )

    @property
    def pid(self) -> int:
        """Process id of the subreaper, the child's parent. Raises RuntimeError before `start`."""
        if self._subreaper is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._subreaper.pid

    def poll(self) -> int | None:
        """None while the child runs, then its exit code (the negative signal number if a signal ended it)."""
        return self._subreaper.poll() if self._subreaper is not None else None

    def last_log_lines(self, count: int = 20) -> str:
        """The last `count` lines written since `start`, or the reason that there are none."""
        try:
            with open(self.log_path, "rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"(no log can be read: {error})"
        return "\n".join(lines[-count:]) or f"({self.log_path} has no new lines)"

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Waits until `ready()`. Raises ProcessStartError if the child dies, or on timeout."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            code = self.poll()
            if code is not None:
                raise ProcessStartError(f"{self.name} died with {describe_exit(code)}; {self._tail()}")
            if time.monotonic() > deadline:
                raise ProcessStartError(f"{self.name} was not ready after {timeout_s:g} s; {self._tail()}")
            time.sleep(POLL_INTERVAL_S)

    def stop(self, timeout_s: float = 0.0) -> int | None:
        """Ends the child and its descendants; returns its exit code (None if it was never started).

        With `timeout_s` > 0 it first sends SIGTERM and waits that long for a graceful exit.
        """
        subreaper = self._subreaper
        if subreaper is None or subreaper.poll() is not None:
            return self.poll()
        steps = [(signal.SIGTERM, timeout_s)] if timeout_s > 0 else []
        for number, wait_s in [*steps, (signal.SIGUSR1, KILL_TIMEOUT_S), (signal.SIGKILL, KILL_TIMEOUT_S)]:
            subreaper.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return subreaper.wait(wait_s)
        raise RuntimeError(f"{self.name} (process {subreaper.pid}) cannot be ended: it did not exit after SIGKILL")

    def _tail(self) -> str:
        return f"last lines of {self.log_path}:\n{self.last_log_lines()}"


def importable(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """PYTHONPATH for a Python child with `environment`: slimrl's folder, installed or not, then the inherited value."""
    root = str(Path(slimrl.__file__).parent.parent)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))}


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """The garbage collector is off in this block, and ignores its objects afterwards; for imports of large packages.

    An import creates objects that stay: the collector would scan all of them again and again and free next to nothing,
    which is a fifth of the time that a server needs for its 5000 modules. A full collection of them stops a server for
    0.3 s, and would do so every 1500 requests.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def describe_exit(code: int) -> str:
    """ "exit code 3" or "exit code -9 (SIGKILL)"."""
    if code >= 0:
        return f"exit code {code}"
    return f"exit code {code} ({signal.Signals(-code).name})"
