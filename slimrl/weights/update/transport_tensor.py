"""Weight transport to servers on the same GPUs: buckets in shared memory, references to them by HTTP.

On CUDA a bucket is a device allocation, opened by an IPC handle with the GPU's UUID, since sender and receiver may
number GPUs differently. On the CPU it is an anonymous file opened through /proc, which is gone with its last user, even
after SIGKILL. It gets pages of 2 MiB, asked for explicitly (Linux 6.1 and later): mapping pages of 4 KiB again for each
bucket was measured at 6 GB/s instead of 16.

On CUDA an engine rank gets the reference of the trainer rank on the same GPU, on the CPU that of one on its node. The
trainer rank of an engine's first rank talks to its server. A server that answers has read the bucket, except for later
pipeline stages: for those the memory is kept until `release`.
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

from slimrl.weights.update.buckets import Bucket, Entry
from slimrl.weights.update.engine_control import ServerControl, WeightSyncError, results

LARGE = 2 * 1024**2
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


def collapse(descriptor: int, begin: int) -> int:
    """Collapses what has been written of the file from byte `begin` on, in whole large pages; returns their end.

    The file must have been written from its start without gaps, and nobody may be reading. Content stays as it is, also
    where the kernel has no large pages to give: then the file merely keeps its small ones.
    """
    end = os.fstat(descriptor).st_blocks * 512 // LARGE * LARGE
    if end <= begin:
        return begin
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    # a mapping at a multiple of the large page: reserved with room to spare, then laid into that
    reserved = libc.mmap(None, end - begin + LARGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved == _FAILED:
        return end
    start = -(-reserved // LARGE) * LARGE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mmap(start, end - begin, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor, begin) != _FAILED:
        libc.madvise(start, end - begin, _MADV_COLLAPSE)
    libc.munmap(reserved, end - begin + LARGE)
    return end


_DEVICE_ARGUMENT = 6  # place of the device number in what `reduce_tensor` returns for a CUDA tensor

# a function and its arguments: called in a process on the same machine, it opens the memory
Reference = tuple[Callable[..., Tensor], tuple[Any, ...]]


class _Call:
    """Unpickles as the result of a function call; the class itself never reaches the receiver."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self._call = (function, tuple(arguments))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


class SharedBuffer(Protocol):
    """A `BufferAllocator` whose memory another process can open."""

    def take(self, num_bytes: int) -> Tensor:
        """See `BufferAllocator.take`."""

    def reference(self) -> Reference:
        """How another process opens the buffer taken last."""

    def release(self) -> None:
        """Gives up what was kept for receivers that may read late: now all have read."""

    def close(self) -> None:
        """Gives the memory up."""


class HostSharedBuffer:
    """One anonymous file in host memory, used again for every bucket that fits.

    With `keep` every bucket has a file of its own, kept until `release`: the whole model's bytes during a weight
    update. What is used again gets large pages.
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
            self._forget()
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
            self._forget()

    def close(self) -> None:
        """See `SharedBuffer.close`."""
        self.release()
        self._forget()

    def _forget(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"


class SharedDoubleBuffer:
    """Two shared buffers used in turn, so that one can be packed while receivers read the other."""

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
        """See `SharedBuffer.release`; the first is next again, so that the same buckets meet the same buffer."""
        for buffer in self._pair:
            buffer.release()
        self._last = self._pair[1]

    def close(self) -> None:
        """See `SharedBuffer.close`."""
        for buffer in self._pair:
            buffer.close()


class CudaSharedBuffer:
    """A fresh device allocation per bucket: an IPC handle may be opened only once by each receiver.

    The caching allocator gives the same memory again once the receiver has let go of it: one bucket's worth is taken
    beyond those in use where receivers have read when they answer, and what is right where they read later.
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
        """See `SharedBuffer.release`; torch itself keeps what others have open, training can have the rest."""
        self.close()

    def close(self) -> None:
        """See `SharedBuffer.close`."""
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
        torch.cuda.ipc_collect()


def serialize(bucket: Bucket, references: Sequence[Reference]) -> str:
    """The bucket as SGLang's "flattened_bucket" payload: a pickle in base64 that holds references, no weights.

    With several references, which must call the same function, each receiver opens that of its rank in its own
    torch.distributed world. Made of classes from torch and the standard library only, which the server's unpickler
    admits.
    """
    payload = {
        "flattened_tensor": _Call(*references[0]) if len(references) == 1 else _of_own_rank(references),
        "metadata": [_metadata(entry) for entry in bucket.entries],
    }
    return base64.b64encode(pickle.dumps(payload)).decode("ascii")


def _of_own_rank(references: Sequence[Reference]) -> _Call:
    """Unpickles as the receiver's own reference, opened; the others stay arguments, because opening them would fail."""
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
        numel=entry.end - entry.start,  # counted in bytes, as the flat tensor is
    )


LOAD_FORMAT = "flattened_bucket"


@dataclasses.dataclass(frozen=True)
class EngineLink:
    """One engine and, for each of its ranks, the trainer rank that supplies its memory.

    `group` is a gloo group of the suppliers, None where there is only one.
    """

    server: ServerControl
    tensor_parallel_size: int
    senders: tuple[int, ...]
    group: dist.ProcessGroup | None

    @property
    def leader(self) -> int:
        """The trainer rank that speaks to the server."""
        return self.senders[0]

    @property
    def has_stages(self) -> bool:
        """Whether the engine has pipeline stages, each of `tensor_parallel_size` ranks."""
        return len(self.senders) > self.tensor_parallel_size

    def payloads(self, bucket: Bucket, own: Reference) -> list[str] | None:
        """One payload per tensor-parallel rank on the leader, None on the others; collective over the suppliers."""
        references = self._references(own)
        if references is None:
            return None
        of_ranks = [references[rank] for rank in self.senders]
        size = self.tensor_parallel_size
        if self.has_stages and len(references) > 1:
            # SGLang gives every stage the same payloads: each rank finds its own reference among all of them
            return [serialize(bucket, of_ranks)] * size
        return [serialize(bucket, [reference]) for reference in of_ranks[:size]]

    def _references(self, own: Reference) -> dict[int, Reference] | None:
        """By trainer rank, on the leader."""
        if self.group is None:
            return {self.leader: own}
        members = sorted(set(self.senders))
        gathered: list[Reference] | None = [own] * len(members) if dist.get_rank() == self.leader else None
        dist.gather_object(own, gathered, dst=self.leader, group=self.group)
        return None if gathered is None else dict(zip(members, gathered, strict=True))

    def share_error(self, error: WeightSyncError | None) -> WeightSyncError | None:
        """The leader's error on every supplier; returns only once all of them have come here."""
        if self.group is None:
            return error
        box = [None if error is None else (str(error), error.final)]
        dist.broadcast_object_list(box, src=self.leader, group=self.group)
        return None if box[0] is None else WeightSyncError(box[0][0], final=box[0][1])


class TensorTransport:
    """Sends buckets to the engines that this rank supplies; the buckets must be packed into `buffer`."""

    def __init__(self, links: list[EngineLink], device: torch.device) -> None:
        self._links = links
        self._pool = ThreadPoolExecutor(max_workers=len(links), thread_name_prefix="weight-references")
        self._calls: list[tuple[ServerControl, Future[None]]] | None = None
        keep = any(link.has_stages for link in links)

        def make() -> SharedBuffer:
            return CudaSharedBuffer(device) if device.type == "cuda" else HostSharedBuffer(keep=keep)

        self.buffer: SharedBuffer = SharedDoubleBuffer(make(), make())

    def start(self, bucket: Bucket) -> None:
        """Tells every engine of this rank where the bucket is; collective over the suppliers of each engine."""
        self._calls = []
        for link in self._links:
            payloads = link.payloads(bucket, self.buffer.reference())
            if payloads is not None:
                self._calls.append((link.server, self._pool.submit(_load, link.server, payloads)))

    def finish(self) -> None:
        """Returns once every engine of this rank has copied the bucket started last.

        Of an engine with pipeline stages the first has. Collective over the suppliers of each engine. Raises
        WeightSyncError, on all of them, naming the server.
        """
        if self._calls is None:
            return
        calls, self._calls = self._calls, None
        error: WeightSyncError | None = None
        try:
            results([s for s, _ in calls], [call for _, call in calls], "updating weights from shared tensors")
        except WeightSyncError as failed:
            error = failed
        errors = [link.share_error(error) for link in self._links]
        first = next((found for found in errors if found is not None), None)
        if first is not None:
            raise first

    def release(self) -> None:
        """Gives up what was kept for later pipeline stages: every one has read it."""
        self.buffer.release()

    def reset(self) -> None:
        """Nothing is left by a failed weight update but memory that later stages may still read."""
        self._calls = None

    def close(self) -> None:
        """Gives the shared memory up."""
        self._pool.shutdown()
        self.buffer.close()

    def leave(self) -> None:
        """Leaves the groups of suppliers."""
        for link in self._links:
            if link.group is not None:
                dist.destroy_process_group(link.group)


def _load(server: ServerControl, payloads: list[str]) -> None:
    server.update_weights_from_tensor(payloads, load_format=LOAD_FORMAT, weight_version=None, flush_cache=False)
