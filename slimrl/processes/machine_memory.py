"""The memory of this machine and its GPUs, from /proc and nvidia-smi. Does not import torch."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

_QUERY = ("--query-gpu=memory.total", "--format=csv,noheader,nounits")
_TIMEOUT_S = 20
_MEMINFO = Path("/proc/meminfo")
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclasses.dataclass(frozen=True)
class Machine:
    """Bytes of each GPU, and of the memory available to processes (None if unknown)."""

    gpus: tuple[int, ...]
    host: int | None


def this_machine() -> Machine:
    """Measures this machine; a GPU driver that does not respond counts as no GPU."""
    return Machine(_gpus(), _host())


def _gpus() -> tuple[int, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        done = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    words = done.stdout.split()
    if done.returncode != 0 or not all(word.isdigit() for word in words):
        return ()
    return tuple(int(word) * 2**20 for word in words)


def _host() -> int | None:
    """Physical memory, or the container's limit if that is lower."""
    if not _MEMINFO.is_file():
        return None
    total = next((line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemTotal:")), None)
    if total is None:
        return None
    physical = int(total.split()[1]) * 1024
    limit = _CONTAINER_LIMIT.read_text().strip() if _CONTAINER_LIMIT.is_file() else "max"
    return min(physical, int(limit)) if limit.isdigit() else physical
