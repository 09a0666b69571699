"""A pool of grader processes; a process is killed when an answer takes too long.

A response can make any parser hang, so graders do not run in the caller's process. One thread of the pool serves all
grader processes. They start on demand and end with the pool or its process.

Requests and replies are JSON lines over pipes, replies in the order of the requests. A `GraderProcess` never blocks and
starts no thread. The process itself is `main`: it reads `{"rule", ...}` and replies `{"value": ...}` or `{"error":
str}`, and the kernel limits its memory. It loads computer algebra when the first answer needs it, and announces that to
the pool, because loading takes longer than the time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from slimrl.engines.protocol import ServiceError

START_LIMIT_S = 120.0
_CHUNK = 1 << 16


class GraderProcess:
    """Runs `script`; each request has `time_limit_s` seconds from the time when it is the oldest."""

    def __init__(self, script: Path, time_limit_s: float) -> None:
        self._time_limit_s = time_limit_s
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        # -P keeps the script's folder out of the import path: its modules would shadow others
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
        assert self._process.stdin is not None and self._process.stdout is not None  # PIPE
        self._pipes = self._process.stdin, self._process.stdout
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
        self._outgoing = b""
        self._incoming = bytearray()
        self._deadline = time.monotonic() + START_LIMIT_S
        self.ready = False
        self.waiting: deque[Any] = deque()  # requests without a reply, oldest first

    @property
    def input_fd(self) -> int:
        """The descriptor to write requests to."""
        return self._pipes[0].fileno()

    @property
    def output_fd(self) -> int:
        """The descriptor to read replies from."""
        return self._pipes[1].fileno()

    @property
    def has_output(self) -> bool:
        """Whether requests wait for room in the pipe."""
        return bool(self._outgoing)

    @property
    def deadline(self) -> float:
        """When it must be killed (`time.monotonic`); infinite while it is idle."""
        return self._deadline if self.waiting or not self.ready else float("inf")

    def ask(self, request: Any, line: bytes) -> None:
        """Queues one request for the next `flush`; `replies` returns `request` with its reply."""
        if not self.waiting and self.ready:
            self._deadline = time.monotonic() + self._time_limit_s
        self.waiting.append(request)
        self._outgoing += line

    def flush(self) -> None:
        """Writes queued requests without blocking."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # `replies` detects a dead process
            written = os.write(self.input_fd, memoryview(self._outgoing)[:_CHUNK])
            self._outgoing = self._outgoing[written:]

    def replies(self) -> list[tuple[Any, dict[str, Any]]] | None:
        """New replies with their requests; None if the process has ended."""
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
        """Kills the process, closes its pipes and returns its exit code."""
        self._process.kill()
        code = self._process.wait()
        for stream in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        return code

    def ended(self) -> tuple[int, str]:
        """Exit code and the end of the stderr of a process that ended by itself; closes its files."""
        code = self._process.wait()
        self._errors.seek(0)
        stderr = self._errors.read().decode(errors="replace").strip()[-500:]
        self.kill()
        self._errors.close()
        return code, stderr


WORKER = Path(__file__)  # runs `main`
TIME_LIMIT_S = 5.0
# Requests queued in one process: enough to hide the round trip, few enough not to wait behind a slow one.
_AHEAD = 4


class GraderFailure(Exception):
    """A grader returned no score: it ran out of time or memory, died, or failed on the answer."""


class GraderUnavailable(ServiceError):
    """Graders do not start, or the pool was closed: no answer can be graded."""


@dataclasses.dataclass(eq=False)
class _Request:
    """One line for a grader and the future of its reply."""

    line: bytes
    future: asyncio.Future[dict[str, Any]]


class GraderPool:
    """At most `size` processes running `script`, one JSON line in and one out per request."""

    def __init__(self, script: Path = WORKER, *, time_limit_s: float = TIME_LIMIT_S, size: int | None = None) -> None:
        self._script = script
        self._time_limit_s = time_limit_s
        self._size = size or default_size()
        self._queue: deque[_Request] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    async def grade(self, request: dict[str, Any]) -> dict[str, Any]:
        """The grader's reply. Raises GraderFailure after the time limit, or if the reply is an `error`.

        Raises GraderUnavailable if graders cannot be started or the pool is closed.
        """
        line = encoded(request) + b"\n"
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        with self._lock:
            if self._closed:
                raise GraderUnavailable("the grader pool was closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="slimrl-graders", daemon=True)
                self._thread.start()
            self._queue.append(_Request(line, future))
            first = len(self._queue) == 1  # else the thread is awake, or checks the queue when a grader is free
        if first:  # after the other tasks that are ready, so that one write announces the requests of all
            loop.call_soon(self._announce)
        reply = await future
        if "error" in reply:
            raise GraderFailure(f"the grader failed: {reply['error']}")
        return reply

    def _announce(self) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Kills every grader; waiting callers get GraderUnavailable."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        dispatcher = _Dispatcher(self._script, self._time_limit_s, self._size, self._queue, self._wake)
        try:
            while not self._closed:
                dispatcher.step()
        finally:
            dispatcher.stop()


class _Dispatcher:
    """The pool's thread: passes requests to processes and replies to futures."""

    def __init__(self, script: Path, time_limit_s: float, size: int, queue: deque[_Request], wake: int) -> None:
        self._script = script
        self._time_limit_s = time_limit_s
        self._size = size
        self._queue = queue
        self._wake = wake
        self._processes: list[GraderProcess] = []
        self._results: defaultdict[asyncio.AbstractEventLoop, list[tuple[Any, Any]]] = defaultdict(list)

    def step(self) -> None:
        """Waits for the next event and handles it."""
        deadline = min((process.deadline for process in self._processes), default=float("inf"))
        poll = select.poll()  # select() cannot watch descriptors above 1023
        poll.register(self._wake, select.POLLIN)
        for process in self._processes:
            poll.register(process.output_fd, select.POLLIN | select.POLLHUP)
            if process.has_output:
                poll.register(process.input_fd, select.POLLOUT)
        left_ms = None if deadline == float("inf") else max(0.0, deadline - time.monotonic()) * 1000 + 1
        events = {fd for fd, _ in poll.poll(left_ms)}
        if self._wake in events:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        for process in list(self._processes):
            if process.output_fd in events:
                self._receive(process)
            elif time.monotonic() >= process.deadline:
                self._time_out(process)
        self._assign()
        for process in self._processes:
            if process.has_output:
                process.flush()
        self._deliver()

    def stop(self) -> None:
        """Kills every process; waiting requests get GraderUnavailable."""
        for process in self._processes:
            for request in process.waiting:
                self._finish(request, GraderUnavailable("the grader pool was closed"))
            process.kill()
        while self._queue:
            self._finish(self._queue.popleft(), GraderUnavailable("the grader pool was closed"))
        self._deliver()

    def _assign(self) -> None:
        while self._queue:
            process = min(self._processes, key=lambda one: len(one.waiting), default=None)
            if process is None or (process.waiting and len(self._processes) < self._size):
                process = GraderProcess(self._script, self._time_limit_s)
                self._processes.append(process)
            if len(process.waiting) >= _AHEAD:
                return
            request = self._queue.popleft()
            if not request.future.cancelled():
                process.ask(request, request.line)

    def _receive(self, process: GraderProcess) -> None:
        replies = process.replies()
        if replies is not None:
            for request, reply in replies:
                self._finish(request, reply)
            return
        self._processes.remove(process)
        waiting, started = process.waiting, process.ready
        code, stderr = process.ended()
        if not started:
            error = GraderUnavailable(f"graders do not start: exit code {code}, stderr: {stderr or 'none'}")
            for request in [*waiting, *self._queue]:
                self._finish(request, error)
            self._queue.clear()
            return
        self._fail_oldest(waiting, f"the grader process died grading, exit code {code}{': ' if stderr else ''}{stderr}")

    def _time_out(self, process: GraderProcess) -> None:
        self._processes.remove(process)
        phase = "grading" if process.ready else "starting"
        process.kill()
        self._fail_oldest(process.waiting, f"the grader took more than {self._time_limit_s:g} s {phase} and was killed")

    def _fail_oldest(self, waiting: deque[_Request], reason: str) -> None:
        """Fails the oldest request and requeues the others for another process."""
        if waiting:
            self._finish(waiting.popleft(), GraderFailure(reason))
        self._queue.extendleft(reversed(waiting))

    def _finish(self, request: _Request, outcome: dict[str, Any] | Exception) -> None:
        self._results[request.future.get_loop()].append((request.future, outcome))

    def _deliver(self) -> None:
        for loop, results in self._results.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(_set_results, results)
        self._results.clear()


def default_size() -> int:
    """Number of graders for this machine: a quarter of its cores, at least two, at most sixteen."""
    return max(2, min(16, (os.cpu_count() or 1) // 4))


def encoded(request: dict[str, Any]) -> bytes:
    """The request as JSON; lone surrogates, which are not valid text, become question marks."""
    try:
        return orjson.dumps(request, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        return json.dumps(request, ensure_ascii=False, default=lambda array: array.tolist()).encode(errors="replace")


def _set_results(results: list[tuple[asyncio.Future[dict[str, Any]], dict[str, Any] | Exception]]) -> None:
    for future, outcome in results:
        if future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


MEMORY_LIMIT_BYTES = 2 << 30


def main() -> None:
    """Processes requests until the input closes."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a busy grader must not outlive a killed parent
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.set_int_max_str_digits(0)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    from slimrl.rollout.rm_hub import rule_reward

    rule_reward.load_graders()
    algebra = _Algebra(lambda notice: print(json.dumps(notice), file=replies))
    print(json.dumps({"ready": True}), file=replies)
    reply: dict[str, Any]
    for line in sys.stdin.buffer:
        try:
            reply = {"value": rule_reward.grade_request(json.loads(line), algebra)}
        except MemoryError:
            reply = {"error": f"MemoryError: the answer needs more than {MEMORY_LIMIT_BYTES >> 20} MiB"}
        except Exception as error:  # a library may raise anything on an adversarial answer
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(reply), file=replies)


class _Algebra:
    """`algebra.equal`, imported at its first use."""

    def __init__(self, notify: Callable[[dict[str, Any]], None]) -> None:
        self._notify = notify
        self._equal: Callable[[str, str], bool] | None = None

    def __call__(self, answer: str, label: str) -> bool:
        if self._equal is None:
            self._notify({"loading": True})
            from slimrl.rollout.rm_hub.math_equivalence import sympy_equal as algebra

            algebra.warm_up()
            self._equal = algebra.equal
            self._notify({"loaded": True})
        return self._equal(answer, label)


if __name__ == "__main__":
    main()
