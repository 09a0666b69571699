"""Delta weight updates (--update-weight-mode delta): the elements that changed since the last update, as values.

One optimizer step at the learning rates of reinforcement learning leaves most bf16 weights as they were. The sender
keeps the weights of the last update in host memory. Of each bucket it sends the changed elements, or, if these are more
than a part of the bucket, the whole bucket as without this mode. Both go the same way: by broadcast, or through shared
memory to engines on the trainer's GPUs. With --update-weight-transport disk they are files (`transport_changed_files`).

The changes of a bucket are a smaller bucket of bytes: a description in JSON, the gaps between changed elements of every
tensor (uint16, one less than the distance; farther elements have unchanged ones between them), their new values, and
room for the answers of engine ranks that read shared memory. Both sides hash gaps and values with XXH3 (128 bits). The
servers' loader is `slimrl.engines.sglang.weight_loaders.load_changes`. A server that could not apply changes is known
after the last bucket. After a failed update the next attempt sends whole buckets.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from slimrl.weights.delta_files import ANSWERS, LARGEST_PART, Bytes, TensorDelta, changed_elements, set_elements
from slimrl.weights.update.buckets import Bucket, BufferAllocator, Entry, Transport
from slimrl.weights.update.transport_changed_files import ChangedFilesTransport
from slimrl.weights.update.weight_updater import WeightUpdater


class ChangesTransport(Transport, Protocol):
    """A `Transport` whose `start` also takes buckets of changes, packed into `changes_buffer`."""

    @property
    def changes_buffer(self) -> BufferAllocator:
        """Memory for the next bucket of changes."""

    def check_changes(self) -> None:
        """Raises WeightSyncError naming the servers that could not apply changes; called after the last bucket."""


def described(deltas: Sequence[TensorDelta]) -> dict[str, Bytes]:
    """The parts of a bucket of changes: "described" (JSON), "gaps" and "values" of all tensors."""
    gaps, values = _joined([delta.gaps for delta in deltas]), _joined([delta.values for delta in deltas])
    checksum = xxhash.xxh3_128(gaps.data)
    checksum.update(values.data)
    tensors = [
        {
            "name": delta.name,
            "shape": delta.shape,
            "dtype": str(delta.dtype).removeprefix("torch."),
            "sent": len(delta.gaps),
        }
        for delta in deltas
    ]
    text = json.dumps({"checksum": checksum.hexdigest(), "tensors": tensors}).encode()
    return {"described": np.frombuffer(text, dtype=np.uint8), "gaps": gaps, "values": values}


def _joined(parts: Sequence[np.ndarray[Any, Any]]) -> Bytes:
    return np.concatenate([np.empty(0, dtype=np.uint8), *(part.view(np.uint8) for part in parts)])


def packed(parts: Mapping[str, Bytes], answers: int, buffer: BufferAllocator) -> Bucket:
    """The bucket of such parts in memory of `buffer`, with room for so many answers."""
    sizes = {name: part.nbytes for name, part in parts.items()} | {ANSWERS: answers}
    flat, entries, end = buffer.take(sum(sizes.values())), [], 0
    for name, size in sizes.items():
        start, end = end, end + size
        entries.append(Entry(name, (size,), torch.uint8, start, end))
        if name == ANSWERS:
            flat[start:end] = 0
        elif size:
            flat[start:end].copy_(torch.from_numpy(parts[name].copy()))
    return Bucket(flat, tuple(entries), last=False, changes=True)


@dataclasses.dataclass(frozen=True)
class _Kept:
    """The tensors of a bucket as the servers have them, flat in host memory."""

    layout: list[tuple[str, tuple[int, ...], torch.dtype]]
    tensors: list[Tensor]


class DeltaTransport:
    """Sends changes and whole buckets through `inner`."""

    def __init__(self, inner: ChangesTransport, engine_ranks: int, fused: Collection[str]) -> None:
        """`engine_ranks` are those of all engines of the update.

        `fused` are the tensors that the servers need in one call with the next one.
        """
        self.saved_bytes = 0  # of the buckets of an update, by sending changes
        self._inner, self._ranks, self._fused = inner, engine_ranks, fused
        self._kept: list[_Kept] = []  # of the last complete update, changed to those of this one
        self._number = 0  # of the next bucket
        self._ends = False  # the last bucket has been started
        self._host: Tensor | None = None  # page-locked memory of one bucket, of GPUs

    @property
    def buffer(self) -> BufferAllocator:
        """See `Transport.buffer`."""
        return self._inner.buffer

    def opens(self, tensor: Tensor) -> bool:
        """See `Transport.opens`."""
        return self._inner.opens(tensor)

    def start(self, bucket: Bucket) -> None:
        """Finds the changes of a bucket, while the servers load the one before, and starts sending them, or it."""
        number, self._number, self._ends = self._number, self._number + 1, bucket.last
        on_host = dataclasses.replace(bucket, flat=self._on_host(bucket.flat))
        new = [tensor.detach().reshape(-1) for _, tensor in on_host.tensors()]
        layout = [(entry.name, entry.shape, entry.dtype) for entry in bucket.entries]
        deltas = None
        if number < len(self._kept) and self._kept[number].layout == layout:
            deltas = self._update(self._kept[number], new, bucket.nbytes)
        else:
            self._kept[number:] = [_Kept(layout, [tensor.clone() for tensor in new])]
        self._inner.finish()
        if deltas is None:
            self._inner.start(bucket)
        elif deltas:
            changes = packed(described(deltas), self._ranks, self._inner.changes_buffer)
            self.saved_bytes += bucket.nbytes - changes.nbytes
            self._inner.start(changes)
        else:
            self.saved_bytes += bucket.nbytes

    def _on_host(self, flat: Tensor) -> Tensor:
        """`flat` itself, or a copy of one on a GPU, which the next call overwrites."""
        if not flat.is_cuda:
            return flat
        if self._host is None or self._host.numel() < flat.numel():
            self._host = None  # first: torch keeps both otherwise
            self._host = torch.empty(flat.numel(), dtype=flat.dtype, pin_memory=True)
        return self._host[: flat.numel()].copy_(flat)

    def _update(self, kept: _Kept, new: Sequence[Tensor], nbytes: int) -> list[TensorDelta] | None:
        """Makes the kept tensors equal to the new ones; returns the changes, None if they are too many."""
        found = [
            changed_elements(name, shape, before, after)
            for (name, shape, _), before, after in zip(kept.layout, kept.tensors, new, strict=True)
        ]
        for delta, before in zip(found, kept.tensors, strict=True):
            if len(delta.gaps):
                set_elements(before.view(torch.uint8).numpy(), before.itemsize, delta.gaps, delta.values)
        if sum(delta.gaps.nbytes + delta.values.nbytes for delta in found) > LARGEST_PART * nbytes:
            return None
        return [delta for delta, wanted in zip(found, _wanted(found, self._fused), strict=True) if wanted]

    def finish(self) -> None:
        """Waits for the last bucket of an update. `start` waits for the one before."""
        if self._ends:
            self._inner.finish()
            self._inner.check_changes()

    def release(self) -> None:
        """Every server has the weights: the next update sends what differs from them."""
        self._number, self._ends = 0, False
        self._inner.release()

    def reset(self) -> None:
        """See `Transport.reset`; the servers may have any mixture of weights."""
        self._kept = []
        self._number, self._ends = 0, False
        self._inner.reset()

    def close(self) -> None:
        """See `Transport.close`."""
        self._host = None
        self._inner.close()

    def leave(self) -> None:
        """See `Transport.leave`."""
        self._inner.leave()


def _wanted(deltas: Sequence[TensorDelta], fused: Collection[str]) -> list[bool]:
    """Whether each tensor is sent: if it, or one that it is fused with, has a change."""
    wanted = [len(delta.gaps) > 0 for delta in deltas]
    groups: list[list[int]] = [[]]
    for number, delta in enumerate(deltas):
        groups[-1].append(number)
        if delta.name not in fused:
            groups.append([])
    for group in groups:
        changed = any(wanted[number] for number in group)
        for number in group:
            wanted[number] = changed
    return wanted


class DeltaUpdater(WeightUpdater):
    """A `WeightUpdater` that sends changes: by broadcast, through shared memory (`colocated`) or by files (`disk`)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """As `WeightUpdater`."""
        super().__init__(*arguments, **options)
        fused = set(self._source.family.names_with_next(self._source.spec))
        inner: Iterator[Any] = iter(self._transports)
        self._deltas = [
            one if isinstance(one, ChangedFilesTransport) else DeltaTransport(one, sum(self._engine_sizes), fused)
            for one in inner
        ]
        self._transports = self._deltas

    def _send(self, model: nn.Module | Sequence[nn.Module]) -> tuple[int, int]:
        for transport in self._deltas:
            transport.saved_bytes = 0
        num_bytes, buckets = super()._send(model)
        return num_bytes - sum(transport.saved_bytes for transport in self._deltas), buckets
