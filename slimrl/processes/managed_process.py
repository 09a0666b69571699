"""The life of a child process that serves: start, wait until ready, watch, end; shared by server and router.

Promises that nothing of the child outlives `stop` or this process, however it ends (see `guardian`), that its output
is in one log file, and that a child that dies while it is waited for is reported at once with its exit code and last
lines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import slimrl
from slimrl.processes import stale_resources

GUARDIAN = Path(__file__).with_name("subreaper.py")
POLL_INTERVAL_S = 0.05
KILL_TIMEOUT_S = 15.0
LOG_TAIL_BYTES = 64 * 1024


class ProcessStartError(RuntimeError):
    """A child died, or did not become ready in time, while it was waited for."""


class ManagedProcess:
    """One child process behind its guardian.

    `name` is in messages ("SGLang server http://..."); `environment` is added to this process's own;
    `shared_memory_prefixes` name the files in /dev/shm that belong to the child and go with it;
    `pass_fds` are open file descriptors that it inherits under the same numbers.
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
        self._guardian: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def start(self) -> None:
        """Starts the child; its output is appended to the log. Raises RuntimeError where it runs already.

        What killed processes of this user left on this machine is removed first.
        """
        if self._guardian is not None and self._guardian.poll() is None:
            raise RuntimeError(f"{self.name} is already running")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        stale_resources.sweep()
        prefixes = [word for prefix in self._prefixes for word in ("--shared-memory-prefix", prefix)]
        isolated = [sys.executable, "-I", "-S", str(GUARDIAN)]
        with open(self.log_path, "ab") as log:
            self._log_start = log.tell()
            self._guardian = subprocess.Popen(
                [*isolated, "--parent", str(os.getpid()), *prefixes, "--", *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                pass_fds=self._pass_fds,
                process_group=0,  # a Ctrl-C on the terminal is for the driver, which then stops its servers in order
            )

    @property
    def pid(self) -> int:
        """Process id of the guardian, above the child. Raises RuntimeError before `start`."""
        if self._guardian is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._guardian.pid

    def poll(self) -> int | None:
        """None while the child runs, then its exit code (minus the signal number where a signal ended it)."""
        return self._guardian.poll() if self._guardian is not None else None

    def last_log_lines(self, count: int = 20) -> str:
        """The last `count` lines written since `start`, or a sentence saying why there are none."""
        try:
            with open(self.log_path, "rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"(no log can be read: {error})"
        return "\n".join(lines[-count:]) or f"({self.log_path} has no new lines)"

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Waits until `ready()`. Raises ProcessStartError when the child dies or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            code = self.poll()
            if code is not None:
                raise ProcessStartError(f"{self.name} died with {describe_exit(code)}; {self._tail()}")
            if time.monotonic() > deadline:
                raise ProcessStartError(f"{self.name} was not ready after {timeout_s:g} s; {self._tail()}")
            time.sleep(POLL_INTERVAL_S)

    def stop(self, timeout_s: float = 0.0) -> int | None:
        """Ends the child and everything below it; returns its exit code (None if it was never started).

        With `timeout_s` > 0 it is asked by SIGTERM first and given that long to end by itself.
        """
        guardian = self._guardian
        if guardian is None or guardian.poll() is not None:
            return self.poll()
        steps = [(signal.SIGTERM, timeout_s)] if timeout_s > 0 else []
        for number, patience_s in [*steps, (signal.SIGUSR1, KILL_TIMEOUT_S), (signal.SIGKILL, KILL_TIMEOUT_S)]:
            guardian.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return guardian.wait(patience_s)
        raise RuntimeError(f"{self.name} (process {guardian.pid}) cannot be ended: it does not react to SIGKILL")

    def _tail(self) -> str:
        return f"last lines of {self.log_path}:\n{self.last_log_lines()}"


def importable(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a Python child with `environment` needs to find slimrl, installed or not, and what its user put in front."""
    root = str(Path(slimrl.__file__).parent.parent)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))}


def describe_exit(code: int) -> str:
    """ "exit code 3" or "exit code -9 (SIGKILL)"."""
    if code >= 0:
        return f"exit code {code}"
    return f"exit code {code} ({signal.Signals(-code).name})"
