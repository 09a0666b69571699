"""One grader process and its pipes: requests go in as JSON lines, replies come back in the same order.

Never blocks and starts no thread; driven by the pool's thread, which owns it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import orjson

START_LIMIT_S = 120.0
_CHUNK = 1 << 16


class GraderProcess:
    """Runs `script`; the oldest request in it has `time_limit_s` seconds from the moment it is its turn."""

    def __init__(self, script: Path, time_limit_s: float) -> None:
        self._time_limit_s = time_limit_s
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        # -P keeps the script's folder, which holds modules of its own names, out of the import path.
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        for pipe in (self._process.stdin, self._process.stdout):
            os.set_blocking(pipe.fileno(), False)
        self._outgoing = b""
        self._incoming = bytearray()
        self._deadline = time.monotonic() + START_LIMIT_S
        self.ready = False
        self.waiting: deque[Any] = deque()  # what was asked and is not answered, oldest first

    @property
    def input_fd(self) -> int:
        """Where requests are written."""
        return self._process.stdin.fileno()

    @property
    def output_fd(self) -> int:
        """Where replies are read."""
        return self._process.stdout.fileno()

    @property
    def has_output(self) -> bool:
        """Whether requests wait for room in the pipe."""
        return bool(self._outgoing)

    @property
    def deadline(self) -> float:
        """When it has to be killed (`time.monotonic`); infinite while it has nothing to do."""
        return self._deadline if self.waiting or not self.ready else float("inf")

    def ask(self, request: Any, line: bytes) -> None:
        """Queues one request for the next `flush`; `request` comes back with its reply."""
        if not self.waiting and self.ready:
            self._deadline = time.monotonic() + self._time_limit_s
        self.waiting.append(request)
        self._outgoing += line

    def flush(self) -> None:
        """Writes what the pipe takes."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # a dead process is seen where it is read
            written = os.write(self.input_fd, memoryview(self._outgoing)[:_CHUNK])
            self._outgoing = self._outgoing[written:]

    def replies(self) -> list[tuple[Any, dict[str, Any]]] | None:
        """What has been answered since the last call, with the requests; None where the process has ended."""
        try:
            chunk = os.read(self.output_fd, _CHUNK)
        except BlockingIOError:
            return []
        if not chunk:
            return None
        self._incoming += chunk
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = bytearray(rest)
        answered = []
        for line in lines:
            reply = orjson.loads(line)
            self._deadline = time.monotonic() + (START_LIMIT_S if "loading" in reply else self._time_limit_s)
            if "ready" in reply:
                self.ready = True
            elif "loading" not in reply and "loaded" not in reply:
                answered.append((self.waiting.popleft(), reply))
        return answered

    def kill(self) -> int:
        """Ends the process at once, frees its pipes and returns its exit code."""
        self._process.kill()
        code = self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        return code

    def ended(self) -> tuple[int, str]:
        """Exit code and last words of a process that ended by itself; frees it."""
        code = self._process.wait()
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip()[-500:]
        self.kill()
        self._errors.close()
        return code, words
