"""Runs functions on N processes that form one torch.distributed world, with a time limit."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def free_port() -> int:
    """A TCP port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RankPool:
    """N processes that stay alive between calls, so that imports are paid for once. Use as a context manager."""

    def __init__(self, world_size: int):
        context = multiprocessing.get_context("spawn")
        self.world_size = world_size
        self._connections: list[Connection] = []
        self._processes = []
        # Set here, because OpenMP reads it while a child imports torch, before any of our code runs there.
        threads, os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS"), "1"
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(rank, world_size, theirs), daemon=True)
                process.start()
                theirs.close()
                self._connections.append(ours)
                self._processes.append(process)
        finally:
            if threads is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = threads

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 240) -> list[Any]:
        """`function(rank, world_size, init_method, *arguments)` on every rank; the results in rank order.

        The function must be importable (a module's own) and leave torch.distributed closed. Raises RuntimeError
        with the traceback of the first rank that failed, TimeoutError after `timeout_s`; the pool is closed then.
        """
        # Through a file: a port that is free now may be taken before the ranks meet there.
        with tempfile.TemporaryDirectory() as folder:
            for connection in self._connections:
                connection.send((function, f"file://{folder}/store", arguments))
            try:
                return self._collect(time.monotonic() + timeout_s)
            except (RuntimeError, TimeoutError):
                self.close()
                raise

    def _collect(self, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            waiting = {self._connections[rank]: rank for rank in range(self.world_size) if rank not in results}
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer in time")
            for connection in ready:
                rank = waiting[connection]
                try:
                    succeeded, value = connection.recv()
                except EOFError:
                    raise RuntimeError(f"rank {rank} died without a result") from None
                if not succeeded:
                    raise RuntimeError(f"rank {rank} failed:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.world_size)]

    def kill(self) -> None:
        """SIGKILL every rank, as a power cut would."""
        for process in self._processes:
            process.kill()
            process.join()

    def close(self) -> None:
        """End every process; none outlives this."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 240) -> list[Any]:
    """`RankPool.run` in processes of its own."""
    with RankPool(world_size) as pool:
        return pool.run(function, *arguments, timeout_s=timeout_s)


def _serve(rank: int, world_size: int, connection: Connection) -> None:
    """Answer calls until the other end hangs up."""
    while True:
        try:
            function, init_method, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, function(rank, world_size, init_method, *arguments))
        except Exception:
            answer = (False, traceback.format_exc())
        connection.send(answer)
        # Process groups end with their last reference, and one that is left over spins on its closed sockets.
        del answer, function, arguments
        gc.collect()
