"""Weight transport to servers on the same GPUs: buckets in shared memory, references to them over HTTP.

On CUDA a bucket is a device allocation, opened by an IPC handle with the GPU's UUID, because sender and receiver may
number GPUs differently. On the CPU it is an anonymous file opened through /proc, which disappears with its last user,
even after SIGKILL. It explicitly requests pages of 2 MiB (Linux 6.1 and later): mapping 4 KiB pages again for each
bucket was measured at 6 GB/s instead of 16.

On CUDA an engine rank gets the reference of the trainer rank on the same GPU, on the CPU that of a trainer rank on its
node. The trainer rank of an engine's first rank calls the server. The server responds when it has read the bucket,
except for later pipeline stages: the memory is kept for them until `release`.
"""

from __future__ import annotations

import base64
import ctypes
import dataclasses
import functools
import itertools
import mmap
import os
import pickle
import types
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from slimrl.engines.server_protocol import WeightControl
from slimrl.weights.update.buckets import Bucket, Entry
from slimrl.weights.update.engine_fanout import WeightSyncError, collect_results

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


_DEVICE_ARGUMENT = 6  # index of the device number in the arguments that `reduce_tensor` returns for a CUDA tensor

# a function and its arguments; calling it in a process on the same machine opens the memory
Reference = tuple[Callable[..., Tensor], tuple[Any, ...]]


class _Call:
    """Unpickles as the result of a function call; the receiver does not need this class."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self._call = (function, tuple(arguments))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


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
            self._buffer = torch.from_file(self._path(), shared=True, size=num_bytes, dtype=torch.uint8)
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
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"


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


def serialize(bucket: Bucket, references: Sequence[Reference]) -> str:
    """The bucket as SGLang's "flattened_bucket" payload: a pickle in base64 that holds references, no weights.

    With several references, which must call the same function, each receiver opens the one of its rank in its own
    torch.distributed world. The pickle uses only classes of torch and the standard library, which the server's
    unpickler allows.
    """
    payload = {
        "flattened_tensor": _Call(*references[0]) if len(references) == 1 else _of_own_rank(references),
        "metadata": [_metadata(entry) for entry in bucket.entries],
    }
    return base64.b64encode(pickle.dumps(payload)).decode("ascii")


def _of_own_rank(references: Sequence[Reference]) -> _Call:
    """Unpickles as the opened reference of the receiver's rank; the others are not opened, because that would fail."""
    function = references[0][0]
    arguments = [arguments for _, arguments in references]
    from_own_rank = _Call(itertools.islice, (arguments, _Call(dist.get_rank, ()), None))
    return _Call(next, (_Call(itertools.starmap, (function, from_own_rank)),))


def _metadata(entry: Entry) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=entry.name,
        shape=entry.shape,
        dtype=entry.dtype,
        start_idx=entry.start,
        end_idx=entry.end,
        numel=entry.end - entry.start,  # in bytes: the flat tensor is uint8
    )


LOAD_FORMAT = "flattened_bucket"


@dataclasses.dataclass(frozen=True)
class EngineLink:
    """One engine and, for each of its ranks, the trainer rank that sends to it.

    `group` is a gloo group of the senders, None if there is only one.
    """

    server: WeightControl
    tensor_parallel_size: int
    senders: tuple[int, ...]
    group: dist.ProcessGroup | None

    @property
    def leader(self) -> int:
        """The trainer rank that calls the server."""
        return self.senders[0]

    @property
    def has_stages(self) -> bool:
        """Whether the engine has pipeline stages, each of `tensor_parallel_size` ranks."""
        return len(self.senders) > self.tensor_parallel_size

    def payloads(self, bucket: Bucket, own: Reference) -> list[str] | None:
        """One payload per tensor-parallel rank on the leader, None on the others; collective over the senders."""
        references = self._references(own)
        if references is None:
            return None
        by_engine_rank = [references[rank] for rank in self.senders]
        size = self.tensor_parallel_size
        if self.has_stages and len(references) > 1:
            # SGLang passes the same payloads to every stage: each rank selects its own reference from all of them
            return [serialize(bucket, by_engine_rank)] * size
        return [serialize(bucket, [reference]) for reference in by_engine_rank[:size]]

    def _references(self, own: Reference) -> dict[int, Reference] | None:
        """References by trainer rank, on the leader; None on other ranks."""
        if self.group is None:
            return {self.leader: own}
        members = sorted(set(self.senders))
        gathered: list[Reference] | None = [own] * len(members) if dist.get_rank() == self.leader else None
        dist.gather_object(own, gathered, dst=self.leader, group=self.group)
        return None if gathered is None else dict(zip(members, gathered, strict=True))

    def share_error(self, error: WeightSyncError | None) -> WeightSyncError | None:
        """Returns the leader's error on every sender, once all of them have called this."""
        if self.group is None:
            return error
        box = [None if error is None else (str(error), error.final)]
        dist.broadcast_object_list(box, src=self.leader, group=self.group)
        return None if box[0] is None else WeightSyncError(box[0][0], final=box[0][1])


class TensorTransport:
    """Sends buckets to the engines of this rank's links; the buckets must be packed into `buffer`."""

    def __init__(self, links: list[EngineLink], device: torch.device) -> None:
        self._links = links
        self._pool = ThreadPoolExecutor(max_workers=len(links), thread_name_prefix="weight-references")
        self._calls: list[tuple[WeightControl, Future[None]]] | None = None
        keep = any(link.has_stages for link in links)

        def make() -> SharedBuffer:
            return CudaSharedBuffer(device) if device.type == "cuda" else HostSharedBuffer(keep=keep)

        self.buffer: SharedBuffer = SharedDoubleBuffer(make(), make())

    def start(self, bucket: Bucket) -> None:
        """Sends every engine of this rank a reference to the bucket; collective over the senders of each engine."""
        self._calls = []
        for link in self._links:
            payloads = link.payloads(bucket, self.buffer.reference())
            if payloads is not None:
                self._calls.append((link.server, self._pool.submit(_load, link.server, payloads)))

    def finish(self) -> None:
        """Waits until every engine of this rank has copied the last started bucket.

        For an engine with pipeline stages, waits for the first stage only. Collective over the senders of each engine.
        Raises WeightSyncError, on all of them, naming the server.
        """
        if self._calls is None:
            return
        calls, self._calls = self._calls, None
        error: WeightSyncError | None = None
        try:
            collect_results([s for s, _ in calls], [call for _, call in calls], "updating weights from shared tensors")
        except WeightSyncError as failed:
            error = failed
        errors = [link.share_error(error) for link in self._links]
        first = next((found for found in errors if found is not None), None)
        if first is not None:
            raise first

    def release(self) -> None:
        """Frees memory kept for later pipeline stages, after all of them have read it."""
        self.buffer.release()

    def reset(self) -> None:
        """Drops the calls of a failed weight update; keeps memory that later pipeline stages may still read."""
        self._calls = None

    def close(self) -> None:
        """Frees the shared memory."""
        self._pool.shutdown()
        self.buffer.close()

    def leave(self) -> None:
        """Leaves the process groups of senders."""
        for link in self._links:
            if link.group is not None:
                dist.destroy_process_group(link.group)


def _load(server: WeightControl, payloads: list[str]) -> None:
    server.update_weights_from_tensor(payloads, load_format=LOAD_FORMAT, weight_version=None, flush_cache=False)
