"""Runs functions on N processes that form one torch.distributed world, with a time limit.

Every call has its own processes, so that no state of one job affects the next: process groups keep threads, which spin
on their closed sockets as long as references to them exist. A server that has imported the heavy packages once forks
them, so that a call costs little more than its own work.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess
from typing import Any
from unittest import mock

# imported by the server; none of them starts a thread
PRELOADED = [
    "torch._dynamo",
    "slimrl.megatron.training.trainer",
    "slimrl.weights.update.weight_updater",
    "transformers",
    "pytest",
]
# Of the server alone. Some of these modules ask torch for GPUs while they are imported, and torch answers by
# initializing CUDA, which no fork of that process can do again, unless it is set to query NVML.
SERVER_ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def free_port() -> int:
    """A free TCP port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RankPool:
    """Starts N ranks for each call. As a context manager it kills ranks that still run on exit."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.processes: list[ForkServerProcess | SpawnProcess] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 240) -> list[Any]:
        """`function(rank, world_size, init_method, *arguments)` on every rank; the results in rank order.

        The function must be importable (a module's own). Raises RuntimeError with the traceback of the first rank that
        failed, TimeoutError after `timeout_s`.
        """
        # Through a file: a free port may be taken before the ranks rendezvous there.
        with tempfile.TemporaryDirectory() as folder:
            self._start(function, f"file://{folder}/store", arguments)
            try:
                return self._collect(time.monotonic() + timeout_s)
            finally:
                self.kill()

    def _start(self, function: Callable[..., Any], init_method: str, arguments: tuple[Any, ...]) -> None:
        context = _context()
        # Plain pickle: multiprocessing's own would pass tensors as handles to memory of a process that ends.
        call = pickle.dumps((function, init_method, arguments))
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, self.world_size, theirs, call), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self.processes.append(process)

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
                    succeeded, value = pickle.loads(connection.recv_bytes())
                except EOFError:
                    raise RuntimeError(f"rank {rank} died without a result") from None
                if not succeeded:
                    raise RuntimeError(f"rank {rank} failed:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.world_size)]

    def kill(self) -> None:
        """SIGKILLs every rank, like a power cut; ranks that have answered are finished anyway."""
        for process in self.processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self.processes, self._connections = [], []


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 240) -> list[Any]:
    """`RankPool.run` once."""
    with RankPool(world_size) as pool:
        return pool.run(function, *arguments, timeout_s=timeout_s)


def _context() -> ForkServerContext | SpawnContext:
    """How ranks start: forked by the server, or as processes that import everything themselves."""
    return fork_server() if _forks_can_use_cuda() else multiprocessing.get_context("spawn")


def fork_server() -> ForkServerContext:
    """The server that forks ranks; it starts with the first rank and ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # Set here, because OpenMP reads it while the server imports torch, before any of our code runs there.
    os.environ["OMP_NUM_THREADS"] = "1"
    with mock.patch.dict(os.environ, SERVER_ENVIRONMENT):
        multiprocessing.forkserver.ensure_running()
    return context


@functools.cache
def _forks_can_use_cuda() -> bool:
    """False where the server initialised CUDA all the same.

    Transformer Engine initializes CUDA if flash-attn is installed too: it queries the device's capability. torch falls
    back to CUDA if NVML cannot count, as with MIG devices.
    """
    context = fork_server()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell_of_cuda, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    with ours:
        usable = ours.recv()
    process.join()
    return usable


def _tell_of_cuda(connection: Connection) -> None:
    import torch

    connection.send(not torch.cuda._is_in_bad_fork())
    connection.close()


def _work(rank: int, world_size: int, connection: Connection, call: bytes) -> None:
    """Answers one call."""
    # Imported objects are frozen for garbage collections, of which Megatron triggers many: traversing them takes a
    # second per fork, which copies all their pages.
    gc.freeze()
    for name in SERVER_ENVIRONMENT:
        os.environ.pop(name, None)
    try:
        function, init_method, arguments = pickle.loads(call)
        answer = (True, function(rank, world_size, init_method, *arguments))
    except Exception:
        answer = (False, traceback.format_exc())
    connection.send_bytes(pickle.dumps(answer))
    connection.close()
