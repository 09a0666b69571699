"""Packs named tensors into flat byte buffers of bounded size, the unit in which weights travel.

Promises that every tensor is in exactly one bucket, in order, without gaps between tensors, so that a
receiver can find each by its byte offset; the last bucket knows that it is the last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where one tensor lies in a bucket: bytes [start, end)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Bucket:
    """`flat` ([bytes], uint8) holds the tensors of `entries` one after another."""

    flat: Tensor
    entries: tuple[Entry, ...]
    last: bool

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, view into the buffer) of each tensor."""
        for entry in self.entries:
            yield entry.name, self.flat[entry.start : entry.end].view(entry.dtype).view(entry.shape)


class BufferSource(Protocol):
    """Gives out the memory that buckets are packed into."""

    def take(self, num_bytes: int) -> Tensor:
        """A uint8 tensor of exactly `num_bytes`; the one taken before is given up by this call."""


class ReusedBuffer:
    """One private buffer, allocated once at the size of the largest bucket asked for so far."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, num_bytes: int) -> Tensor:
        """See `BufferSource.take`."""
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._buffer.device)
        return self._buffer[:num_bytes]


def iter_buckets(
    named_tensors: Iterable[tuple[str, Tensor]], max_bytes: int, buffers: BufferSource
) -> Iterator[Bucket]:
    """Buckets of at most `max_bytes`; a larger tensor travels alone in a bucket of its own size.

    A bucket is valid until the next one is asked for. Each yielded tensor is copied before the next is asked
    for. Raises ValueError where `max_bytes` is not positive or there is no tensor at all.
    """
    if max_bytes <= 0:
        raise ValueError(f"--update-weight-buffer-size is {max_bytes}: it counts bytes and must be positive")
    tensors = iter(named_tensors)
    pending = next(tensors, None)
    if pending is None:
        raise ValueError("there is no tensor to pack: the model has no weights")
    while pending is not None:
        capacity = max(max_bytes, pending[1].nbytes)
        buffer = buffers.take(capacity)
        entries: list[Entry] = []
        end = 0
        while pending is not None and _fits(pending[1], end, capacity):
            name, tensor = pending
            start, end = end, end + tensor.nbytes
            buffer[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            entries.append(Entry(name, tuple(tensor.shape), tensor.dtype, start, end))
            pending = next(tensors, None)
        yield Bucket(buffer[:end], tuple(entries), last=pending is None)


def _fits(tensor: Tensor, start: int, capacity: int) -> bool:
    # a view of another dtype must start at a multiple of its item size
    return start % tensor.itemsize == 0 and start + tensor.nbytes <= capacity
