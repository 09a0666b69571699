"""Differences between CUDA and CPU machines, for all other packages.

The device of a process depends on `torch.cuda.is_available()` alone. Used by all code that places tensors, opens
process groups or seeds generators. The names below import torch at their first use: `launch_env` decides without it, in
actors that only start other processes and would otherwise spend more than a second of their start on torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slimrl.platform.compute_device import (
        bind_local_device,
        device,
        device_memory,
        is_cpu,
        seed_everything,
        use_deterministic_kernels,
    )

__all__ = ["bind_local_device", "device", "device_memory", "is_cpu", "seed_everything", "use_deterministic_kernels"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    functions = importlib.import_module("slimrl.platform.compute_device")
    globals().update({function: getattr(functions, function) for function in __all__})
    return globals()[name]
