"""Differences between CUDA and CPU machines, for all other packages; here the compute device of this process.

The device of a process depends on `torch.cuda.is_available()` alone. Nothing is cached, so the result is correct even
if a process hides its GPUs after import. Used by all code that places tensors, opens process groups or seeds
generators. The functions import torch: `launch_env` decides without it, in actors that only start other processes and
would otherwise spend more than a second of their start on torch.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def is_cpu() -> bool:
    """True if CUDA is not available, also with a CUDA build of torch on a machine without a GPU."""
    import torch

    return not torch.cuda.is_available()


def device(local_rank: int = 0) -> torch.device:
    """The device of the process with this local rank: `cuda:<local_rank>`, or `cpu`.

    Raises ValueError if the machine has GPUs, but fewer than `local_rank + 1`.
    """
    import torch

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
    import torch

    chosen = device(local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return chosen


def use_deterministic_kernels() -> None:
    """Makes every torch operation in this process bitwise reproducible, or raise RuntimeError."""
    import torch

    torch.use_deterministic_algorithms(True)
    # It would fill the memory of every `torch.empty`. Nothing reads that memory before it is written, and DeepEP, whose
    # own streams write to it, refuses to run with the fill.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # a property of its class
    torch.backends.cudnn.benchmark = False  # True would choose kernels by measured time


def device_memory() -> dict[str, float]:
    """Device memory in GiB: this process's tensors, their peak, its allocator's reserve, and all processes.

    Empty without CUDA, and before this process has used it.
    """
    import torch

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
    import numpy
    import torch

    if seed < 0:
        raise ValueError(f"--seed {seed} is negative: give a seed of 0 or more")
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
