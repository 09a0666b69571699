"""Graders in processes of their own, a few of them, each killed when one request takes too long.

A response can make any parser hang, so nothing that judges one runs in the caller's process without a bound.
Created and closed by the reward scorer; workers start when first needed and end with the pool or its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson

MATH_WORKER = Path(__file__).with_name("math_worker.py")
TIME_LIMIT_S = 5.0
_START_LIMIT_S = 120.0


class GraderFailure(Exception):
    """A grader gave no verdict: it ran out of time, died, or failed on the answer."""


class GraderPool:
    """At most `size` worker processes running `script`, one JSON line in and one out per request."""

    def __init__(
        self, script: Path = MATH_WORKER, *, time_limit_s: float = TIME_LIMIT_S, size: int | None = None
    ) -> None:
        self._script = script
        self._time_limit_s = time_limit_s
        size = size or max(2, min(16, (os.cpu_count() or 1) // 4))
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="slimrl-grader")
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._closed = False

    async def grade(self, request: dict[str, Any]) -> dict[str, Any]:
        """The worker's reply. Raises GraderFailure where there is none within the time limit, or an `error`."""
        reply = await asyncio.get_running_loop().run_in_executor(self._threads, self._grade, request)
        if "error" in reply:
            raise GraderFailure(f"the grader failed: {reply['error']}")
        return reply

    def close(self) -> None:
        """Kills every worker and waits for the threads that spoke to them."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy, self._busy = self._busy, set()
        for worker in idle:
            worker.kill()
        for worker in busy:
            worker.interrupt()
        self._threads.shutdown(cancel_futures=True)

    def _grade(self, request: dict[str, Any]) -> dict[str, Any]:
        # One thread speaks to one worker at a time, so the number of threads bounds the number of workers.
        worker = self._take_worker()
        try:
            reply = worker.ask(request, self._time_limit_s)
        except GraderFailure:
            with self._lock:
                self._busy.discard(worker)
            worker.kill()
            raise
        with self._lock:
            self._busy.discard(worker)
            if not self._closed:
                self._idle.append(worker)
                return reply
        worker.kill()
        return reply

    def _take_worker(self) -> _Worker:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
            if worker is not None:
                self._busy.add(worker)
                return worker
        worker = _Worker(self._script)
        with self._lock:
            if not self._closed:
                self._busy.add(worker)
                return worker
        worker.kill()
        raise GraderFailure("the grader pool was closed")


class _Worker:
    """One grader process and its two pipes."""

    def __init__(self, script: Path) -> None:
        # -P keeps the script's folder, which holds modules of its own names, out of the import path.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._pending = b""
        try:
            self._read_line(_START_LIMIT_S, "starting")
        except GraderFailure:
            self.kill()
            raise

    def ask(self, request: dict[str, Any], time_limit_s: float) -> dict[str, Any]:
        """Sends one request and waits for its reply."""
        try:
            self._process.stdin.write(orjson.dumps(request) + b"\n")
        except BrokenPipeError as error:
            raise GraderFailure("the grader process died between two requests") from error
        return orjson.loads(self._read_line(time_limit_s, "grading"))

    def interrupt(self) -> None:
        """Ends the process; whoever waits for its reply sees it die and frees it."""
        self._process.kill()

    def kill(self) -> None:
        """Ends the process at once and frees its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _read_line(self, time_limit_s: float, doing: str) -> bytes:
        deadline = time.monotonic() + time_limit_s
        poll = select.poll()  # select() cannot watch descriptors above 1023
        poll.register(self._process.stdout, select.POLLIN | select.POLLHUP)
        while b"\n" not in self._pending:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise GraderFailure(f"the grader took more than {time_limit_s:g} s {doing} and was killed")
            chunk = self._process.stdout.read(65536)
            if not chunk:
                raise GraderFailure(f"the grader process died {doing}, exit code {self._process.wait()}")
            self._pending += chunk
        line, self._pending = self._pending.split(b"\n", 1)
        return line
