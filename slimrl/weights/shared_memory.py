"""Buckets in memory that an inference server on the same machine opens without a copy over the wire.

On the CPU the memory is an anonymous file reached through /proc: it has no name to leave behind and is gone
with its last user, even after SIGKILL. On CUDA it is a device allocation handed over by an IPC handle, named
by the GPU's UUID because sender and receiver may number their GPUs differently.
"""

from __future__ import annotations

import base64
import functools
import itertools
import os
import pickle
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from slimrl.weights.buckets import Bucket, Entry
from slimrl.weights.large_pages import collapse

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
    """A `BufferSource` whose memory another process can open."""

    def take(self, num_bytes: int) -> Tensor:
        """See `BufferSource.take`."""

    def reference(self) -> Reference:
        """How another process opens the buffer taken last."""

    def release(self) -> None:
        """Gives up what was kept for receivers that may read late: now all have read."""

    def close(self) -> None:
        """Gives the memory up."""


class HostSharedBuffer:
    """One anonymous file in host memory, used again for every bucket that fits.

    With `keep` every bucket has a file of its own, kept until `release`: the whole model's bytes during a push. What is
    used again gets large pages.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._kept: list[int] = []
        self._descriptor: int | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._collapsed = 0

    def take(self, num_bytes: int) -> Tensor:
        """See `BufferSource.take`. Pages cost memory only once written."""
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


class TwoSharedInTurn:
    """Two shared buffers used in turn, so that one can be packed while receivers read the other."""

    def __init__(self, first: SharedBuffer, second: SharedBuffer) -> None:
        self._pair = (first, second)
        self._last = second

    def take(self, num_bytes: int) -> Tensor:
        """See `BufferSource.take`."""
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
        """See `BufferSource.take`."""
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
