"""Memory that other processes on the machine can open: buckets of a weight update, and the trainer's own weights.

On CUDA a bucket is a device allocation, opened by an IPC handle with the GPU's UUID, because sender and receiver may
number GPUs differently. On the CPU it is an anonymous file opened through /proc, which disappears with its last user,
even after SIGKILL. It explicitly requests pages of 2 MiB (Linux 6.1 and later): mapping 4 KiB pages again for each
bucket was measured at 6 GB/s instead of 16.

`shared_copies` moves a trainer's weights into such a file, so that servers read them where they are.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing import reductions

LARGE = 2 * 1024**2
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


def collapse(descriptor: int, begin: int) -> int:
    """Collapses the file's written bytes from `begin` on into whole huge pages; returns the end of these pages.

    The file must have been written from its start without gaps, and no process may be reading it. The content is
    unchanged; if the kernel has no free huge pages, the file keeps its small ones.
    """
    end = os.fstat(descriptor).st_blocks * 512 // LARGE * LARGE
    if end <= begin:
        return begin
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    # a mapping aligned to the huge page size: reserve a larger range, then map inside it
    reserved = libc.mmap(None, end - begin + LARGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved == _FAILED:
        return end
    start = -(-reserved // LARGE) * LARGE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mmap(start, end - begin, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor, begin) != _FAILED:
        libc.madvise(start, end - begin, _MADV_COLLAPSE)
    libc.munmap(reserved, end - begin + LARGE)
    return end


_ALIGNMENT = 64  # bytes, of a weight in a file: any element of any dtype, and a line of the processor's cache

_DEVICE_ARGUMENT = 6  # index of the device number in the arguments that `reduce_tensor` returns for a CUDA tensor

# a function and its arguments; calling it in a process on the same machine opens the memory
Reference = tuple[Callable[..., Tensor], tuple[Any, ...]]


class SharedBuffer(Protocol):
    """A `BufferAllocator` whose memory another process can open."""

    def take(self, num_bytes: int) -> Tensor:
        """See `BufferAllocator.take`."""

    def reference(self) -> Reference:
        """Reference with which another process opens the buffer taken last."""

    def release(self) -> None:
        """Frees memory kept for slow receivers, after all of them have read it."""

    def close(self) -> None:
        """Frees the memory."""


class HostSharedBuffer:
    """One anonymous file in host memory, reused for every bucket that fits.

    With `keep` every bucket has its own file, kept until `release`: the whole model's bytes during a weight update.
    A reused file gets huge pages.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._kept: list[int] = []
        self._descriptor: int | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._collapsed = 0

    def take(self, num_bytes: int) -> Tensor:
        """See `BufferAllocator.take`. Pages cost memory only once written."""
        if self._keep and self._descriptor is not None:
            self._kept.append(self._descriptor)
            self._descriptor = None
        if self._descriptor is None or self._buffer.numel() < num_bytes:
            self._free()
            self._descriptor = os.memfd_create("slimrl-weights", os.MFD_CLOEXEC)
            os.ftruncate(self._descriptor, num_bytes)
            # not by the path for other processes, so that `shared_file` does not take a bucket for a weight
            path = f"/proc/self/fd/{self._descriptor}"
            self._buffer = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
            self._collapsed = 0
        else:
            self._collapsed = collapse(self._descriptor, self._collapsed)
        return self._buffer[:num_bytes]

    def reference(self) -> Reference:
        """See `SharedBuffer.reference`; the receiver needs the same user and process namespace."""
        mapped = functools.partial(torch.from_file, dtype=torch.uint8)
        return mapped, (self._path(), True, self._buffer.numel())

    def release(self) -> None:
        """See `SharedBuffer.release`."""
        while self._kept:
            os.close(self._kept.pop())
        if self._keep:
            self._free()

    def close(self) -> None:
        """See `SharedBuffer.close`."""
        self.release()
        self._free()

    def _free(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _path(self) -> str:
        assert self._descriptor is not None
        return _own_path(self._descriptor)


class SharedDoubleBuffer:
    """Two alternating shared buffers, so that one can be packed while receivers read the other."""

    def __init__(self, first: SharedBuffer, second: SharedBuffer) -> None:
        self._pair = (first, second)
        self._last = second

    def take(self, num_bytes: int) -> Tensor:
        """See `BufferAllocator.take`."""
        self._last = self._pair[0] if self._last is self._pair[1] else self._pair[1]
        return self._last.take(num_bytes)

    def reference(self) -> Reference:
        """See `SharedBuffer.reference`."""
        return self._last.reference()

    def release(self) -> None:
        """See `SharedBuffer.release`; starts with the first again, so that only one must grow to the largest bucket."""
        for buffer in self._pair:
            buffer.release()
        self._last = self._pair[1]

    def close(self) -> None:
        """See `SharedBuffer.close`."""
        for buffer in self._pair:
            buffer.close()


class CudaSharedBuffer:
    """A new device allocation per bucket, because each receiver may open an IPC handle only once.

    The caching allocator reuses the memory once the receiver has closed it: this takes one extra bucket if receivers
    respond after reading, and as many as needed if they read later.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, num_bytes: int) -> Tensor:
        """See `BufferAllocator.take`."""
        self.close()
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._buffer

    def reference(self) -> Reference:
        """See `SharedBuffer.reference`; the receiver waits for the work queued here so far."""
        function, arguments = reductions.reduce_tensor(self._buffer)
        named = list(arguments)
        named[_DEVICE_ARGUMENT] = str(torch.cuda.get_device_properties(self._device).uuid)
        return function, tuple(named)

    def release(self) -> None:
        """See `SharedBuffer.release`; torch keeps allocations that other processes have open and frees the rest."""
        self.close()

    def close(self) -> None:
        """See `SharedBuffer.close`."""
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
        torch.cuda.ipc_collect()


def shared_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of host tensors in one new anonymous file, which is closed when the last of them is freed."""
    starts = [0]
    for tensor in tensors:
        starts.append(-(-(starts[-1] + tensor.nbytes) // _ALIGNMENT) * _ALIGNMENT)
    descriptor = os.memfd_create("slimrl-weights", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, max(starts[-1], 1))
    whole = torch.from_file(_own_path(descriptor), shared=True, size=max(starts[-1], 1), dtype=torch.uint8)
    weakref.finalize(whole.untyped_storage(), os.close, descriptor)
    copies = []
    for start, tensor in zip(starts, tensors, strict=False):
        copy = whole[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(copy.copy_(tensor.detach()))
    collapse(descriptor, 0)
    return copies


def shared_file(tensor: Tensor) -> str | None:
    """The path at which other processes can open the memory of a tensor of `shared_copies`; None for other tensors."""
    if tensor.device.type != "cpu":
        return None
    path = tensor.untyped_storage().filename
    return path if path is not None and path.startswith(_own_path("")) else None


def _own_path(descriptor: int | str) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"
