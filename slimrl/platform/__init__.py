"""What differs between a CUDA machine and a CPU machine, below every engine.

Promises one answer per process, derived from `torch.cuda.is_available()` alone. Called by every room that
places a tensor, opens a process group or seeds a generator.
"""

from slimrl.platform.device import (
    bind_local_device,
    device,
    device_memory,
    is_cpu,
    seed_everything,
    use_deterministic_kernels,
)

__all__ = ["bind_local_device", "device", "device_memory", "is_cpu", "seed_everything", "use_deterministic_kernels"]
