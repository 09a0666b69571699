"""Collectives between all GPUs of this machine: bitwise correctness and speed. Needs only torch."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from tools.gpu_check.checks.machine import synchronize
from tools.gpu_check.record import Record

CPU_RANKS = 2
GB = 1e9


def collectives(record: Record, device: str, num_bytes: int, rounds: int) -> None:
    """One process per GPU; each result is compared with numbers that every rank can compute by itself."""
    ranks = torch.cuda.device_count() if device == "cuda" else CPU_RANKS
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (ranks, folder, device, num_bytes, rounds), nprocs=ranks)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    record.figure("ranks", ranks)
    for name in ("broadcast", "all-reduce"):
        wrong = [rank for rank in range(ranks) if not found[rank][name]["right"]]
        record.require(not wrong, f"{name}: ranks {wrong} have wrong bytes")
        record.figure(name, num_bytes / max(one[name]["seconds"] for one in found) / GB, "GB/s")


def work(rank: int, ranks: int, folder: str, device: str, num_bytes: int, rounds: int) -> None:
    """One rank: writes {"right", "seconds"} of each collective to `folder`/`rank`.json."""
    place = f"cuda:{rank}" if device == "cuda" else device
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    expected = pattern(num_bytes, place)
    values = expected.clone() if rank == 0 else torch.zeros_like(expected)
    dist.broadcast(values, 0)
    found: dict[str, dict[str, float]] = {"broadcast": {"right": torch.equal(values, expected)}}
    found["broadcast"]["seconds"] = fastest(lambda: dist.broadcast(values, 0), place, rounds)
    # whole numbers in float32: their sum is exact in any order
    own = torch.full((num_bytes // 4,), float(rank + 1), device=place)
    dist.all_reduce(own)
    found["all-reduce"] = {"right": bool((own == ranks * (ranks + 1) / 2).all())}
    found["all-reduce"]["seconds"] = fastest(lambda: dist.all_reduce(own), place, rounds)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def pattern(num_bytes: int, place: str) -> torch.Tensor:
    """The same values on every kind of device, unlike random numbers."""
    return torch.arange(num_bytes // 4, dtype=torch.int32, device=place).mul_(-1640531527).view(torch.uint8)


def fastest(call: Callable[[], object], place: str, rounds: int) -> float:
    """Seconds of the fastest call; all ranks start each call together."""
    taken = []
    for _ in range(rounds):
        dist.barrier()
        synchronize(place)
        started = time.perf_counter()
        call()
        synchronize(place)
        taken.append(time.perf_counter() - started)
    return min(taken)
