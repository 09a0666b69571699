"""Packs tensors into flat byte buckets of bounded size for a weight update; interface of the transports that send them.

Every tensor is in exactly one bucket, in order and without gaps, so that a receiver finds each by its byte offset. The
last bucket is marked as the last.

A weight update may run several `Transport`s in parallel; if one fails, the others continue.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from slimrl.weights.update.engine_fanout import WeightSyncError

Unit = list[tuple[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where one tensor is in a bucket: bytes [start, end), or none if it is in its own `shared` memory."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int
    shared: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Bucket:
    """`flat` ([bytes], uint8) holds the packed tensors of `entries` one after another.

    With `changes` these are not weights but changes of them (`transport_delta`), for the engines' loader of changes.
    """

    flat: Tensor
    entries: tuple[Entry, ...]
    last: bool
    changes: bool = False

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, view into the buffer) of each tensor."""
        for entry in self.entries:
            if entry.shared is not None:
                yield entry.name, entry.shared
            else:
                yield entry.name, self.flat[entry.start : entry.end].view(entry.dtype).view(entry.shape)

    @property
    def has_shared(self) -> bool:
        """Whether a tensor is not packed."""
        return any(entry.shared is not None for entry in self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.flat.numel() + sum(entry.shared.nbytes for entry in self.entries if entry.shared is not None)


class BufferAllocator(Protocol):
    """Allocates the memory that buckets are packed into."""

    def take(self, num_bytes: int) -> Tensor:
        """A uint8 tensor of exactly `num_bytes`; invalidates the previous one (double buffer: the one before that)."""


class ReusedBuffer:
    """One private buffer of the size of the largest bucket requested so far."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, num_bytes: int) -> Tensor:
        """See `BufferAllocator.take`."""
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._buffer.device)
        return self._buffer[:num_bytes]


class DoubleBuffer:
    """Two alternating buffers, so that one can be packed while the other is still being read."""

    def __init__(self, first: BufferAllocator, second: BufferAllocator) -> None:
        self._pair = (first, second)
        self._taken = 0

    def take(self, num_bytes: int) -> Tensor:
        """See `BufferAllocator.take`."""
        buffer = self._pair[self._taken % 2]
        self._taken += 1
        return buffer.take(num_bytes)

    def rewind(self) -> None:
        """Starts with the first buffer again, so that only one of them must grow to the largest bucket."""
        self._taken = 0


class BucketSpace:
    """Memory for an exporter to join a row's tensors in: the place where they will be packed, if the bucket has room.

    Then `iter_buckets` need not copy them. Otherwise, private memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._scratch = ReusedBuffer(device)
        self._free: Tensor | None = None

    def take(self, num_bytes: int) -> Tensor:
        """See `BufferAllocator.take`; starts at a multiple of 8 bytes."""
        if self._free is not None and num_bytes <= self._free.numel() and self._free.data_ptr() % 8 == 0:
            return self._free[:num_bytes]
        return self._scratch.take(num_bytes)

    def offer(self, free: Tensor | None) -> None:
        """Sets the rest of the open bucket, uint8; None: the next tensors do not go to its start."""
        self._free = free


def never(_: Tensor) -> bool:
    """No receiver can open the tensor's own memory."""
    return False


def iter_buckets(
    named_tensors: Iterable[tuple[str, Tensor]],
    max_bytes: int,
    buffers: BufferAllocator,
    fuse_with_next: Collection[str] = (),
    *,
    space: BucketSpace | None = None,
    opens: Callable[[Tensor], bool] = never,
) -> Iterator[Bucket]:
    """Yields buckets of at most `max_bytes`; a larger tensor gets a bucket of its own size.

    A tensor named in `fuse_with_next` is in the same bucket as the one after it. A bucket is valid until the next one
    is requested; with a `DoubleBuffer`, until the one after that. Each input tensor is copied before the next one is
    requested, unless `opens(tensor)`: then the entry refers to the tensor, which takes no room. `space` is that of the
    exporter of `named_tensors`, if it has one. Raises ValueError if `max_bytes` is not positive or there is no tensor.
    """
    if max_bytes <= 0:
        raise ValueError(f"--update-weight-buffer-size is {max_bytes}: it counts bytes and must be positive")
    space = space or BucketSpace(torch.device("cpu"))
    units = _units(named_tensors, fuse_with_next, space, opens)
    pending = next(units, None)
    if pending is None:
        raise ValueError("there is no tensor to pack: the model has no weights")
    while pending is not None:
        capacity = max(max_bytes, sum(tensor.nbytes for _, tensor in pending if not opens(tensor)))
        buffer = buffers.take(capacity)
        entries: list[Entry] = []
        end = 0
        # the capacity is at least the first unit's size
        while pending is not None and (not entries or _fits(pending, end, capacity, opens)):
            for name, tensor in pending:
                start, shared = end, tensor if opens(tensor) else None
                if shared is None:
                    end += tensor.nbytes
                    _place(tensor, buffer[start:end])
                entries.append(Entry(name, tuple(tensor.shape), tensor.dtype, start, end, shared))
            space.offer(buffer[end:])
            pending = next(units, None)
        yield Bucket(buffer[:end], tuple(entries), last=pending is None)


def _place(tensor: Tensor, place: Tensor) -> None:
    """Copies the tensor into `place`, uint8 [bytes], unless it is there already."""
    if tensor.data_ptr() != place.data_ptr() or not tensor.is_contiguous():
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _units(
    named_tensors: Iterable[tuple[str, Tensor]],
    fuse_with_next: Collection[str],
    space: BucketSpace,
    opens: Callable[[Tensor], bool],
) -> Iterator[Unit]:
    """The tensors one by one, or several together if they must be in one bucket."""
    unit: Unit = []
    for name, tensor in named_tensors:
        if name in fuse_with_next:
            # it is valid only until the next row is requested, which must not be written to this one's place
            unit.append((name, tensor if opens(tensor) else tensor.clone()))
            space.offer(None)
        else:
            yield [*unit, (name, tensor)]
            unit = []
    if unit:
        raise ValueError(
            f"{unit[-1][0]} must be in the same bucket as the next tensor, but it is the last: the mapping is wrong"
        )


def _fits(unit: Unit, start: int, capacity: int, opens: Callable[[Tensor], bool]) -> bool:
    for _, tensor in unit:
        if opens(tensor):
            continue
        # a view of another dtype must start at a multiple of its item size
        if start % tensor.itemsize or start + tensor.nbytes > capacity:
            return False
        start += tensor.nbytes
    return True


class Transport(Protocol):
    """One way to send buckets to some of the servers."""

    @property
    def buffer(self) -> BufferAllocator:
        """Memory for the next bucket."""

    def opens(self, tensor: Tensor) -> bool:
        """Whether every server can open the tensor's own memory, so that it need not be packed."""

    def start(self, bucket: Bucket) -> None:
        """Starts sending a bucket, which must not change until `finish`; raises the same errors as `finish`."""

    def finish(self) -> None:
        """Waits until every server has the last started bucket, if any is in progress.

        Raises WeightSyncError naming each server that failed.
        """

    def release(self) -> None:
        """Frees memory kept for the servers' later pipeline stages, after all of them have read it."""

    def reset(self) -> None:
        """Cleans up after a failed weight update, so that the next can start; never raises for a dead server."""

    def close(self) -> None:
        """Closes what stays open between weight updates."""

    def leave(self) -> None:
        """Leaves process groups among trainers, after `close` on all of them."""


class TransportGroup:
    """The transports of one weight update; a transport is not used again after its first failure."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._working = list(transports)
        self._errors: list[WeightSyncError] = []

    def run(self, step: Callable[[Transport], None]) -> None:
        """Runs `step` on each transport that has not failed yet."""
        for transport in tuple(self._working):
            try:
                step(transport)
            except WeightSyncError as error:
                self._working.remove(transport)
                self._errors.append(error)

    def raise_first(self) -> None:
        """Raises the first failure, if any."""
        if self._errors:
            raise self._errors[0]
