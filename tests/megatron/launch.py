"""Runs a function on N fresh processes that form one torch.distributed world, with a time limit."""

from __future__ import annotations

import multiprocessing
import os
import socket
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


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 150) -> list[Any]:
    """`function(rank, world_size, init_method, *arguments)` on every rank; the results in rank order.

    The function must be importable (a module's own). Raises RuntimeError with the traceback of the first rank that
    failed, TimeoutError where the ranks together take longer than `timeout_s`; no process outlives the call.
    """
    context = multiprocessing.get_context("spawn")
    init_method = f"tcp://127.0.0.1:{free_port()}"
    receivers, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_rank, args=(function, rank, world_size, init_method, arguments, sender), daemon=True
        )
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    try:
        return _collect(receivers, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def _run_rank(
    function: Callable[..., Any], rank: int, world_size: int, init_method: str, arguments: tuple, sender: Connection
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    try:
        sender.send((True, function(rank, world_size, init_method, *arguments)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
        raise
    finally:
        sender.close()


def _collect(receivers: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        waiting = [receiver for rank, receiver in enumerate(receivers) if rank not in results]
        ready = multiprocessing.connection.wait(waiting, timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            raise TimeoutError(f"ranks {[receivers.index(w) for w in waiting]} did not answer in time")
        for receiver in ready:
            rank = receivers.index(receiver)
            try:
                succeeded, value = receiver.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died without a result") from None
            if not succeeded:
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]
