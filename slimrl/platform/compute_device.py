"""The compute device of this process, its memory, deterministic kernels, and the seeding of all random generators.

Nothing is cached, so the result is correct even if a process hides its GPUs after import. Seeding covers Python, NumPy
and torch (CPU and, if present, CUDA).
"""

from __future__ import annotations

import random

import numpy
import torch


def is_cpu() -> bool:
    """True if CUDA is not available, also with a CUDA build of torch on a machine without a GPU."""
    return not torch.cuda.is_available()


def device(local_rank: int = 0) -> torch.device:
    """The device of the process with this local rank: `cuda:<local_rank>`, or `cpu`.

    Raises ValueError if the machine has GPUs, but fewer than `local_rank + 1`.
    """
    if is_cpu():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if not 0 <= local_rank < visible:
        raise ValueError(
            f"local rank {local_rank} has no GPU: {visible} GPUs are visible to this process;"
            " start at most one process per GPU or widen CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", local_rank)


def bind_local_device(local_rank: int = 0) -> torch.device:
    """Make `device(local_rank)` the current device of this process and return it."""
    chosen = device(local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return chosen


def use_deterministic_kernels() -> None:
    """Makes every torch operation in this process bitwise reproducible, or raise RuntimeError."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # True would choose kernels by measured time


def device_memory() -> dict[str, float]:
    """Device memory in GiB: this process's tensors, their peak, its allocator's reserve, and all processes.

    Empty without CUDA, and before this process has used it.
    """
    if is_cpu() or not torch.cuda.is_initialized():
        return {}
    free, total = torch.cuda.mem_get_info()
    amounts = {
        "cuda_allocated_gib": torch.cuda.memory_allocated(),
        "cuda_peak_gib": torch.cuda.max_memory_allocated(),
        "cuda_reserved_gib": torch.cuda.memory_reserved(),
        "cuda_device_used_gib": total - free,
    }
    return {name: amount / (1 << 30) for name, amount in amounts.items()}


def seed_everything(seed: int) -> None:
    """Seed `random`, `numpy.random` and torch with `seed`.

    Raises ValueError for a negative seed, which NumPy does not accept.
    """
    if seed < 0:
        raise ValueError(f"--seed {seed} is negative: give a seed of 0 or more")
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
