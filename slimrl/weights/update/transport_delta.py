"""Delta weight updates (--update-weight-mode delta): the elements that changed since the last update, as values.

One optimizer step at the learning rates of reinforcement learning leaves most bf16 weights as they were. The sender
keeps the weights of the last update in host memory. Of each bucket it sends the changed elements in one HTTP call to
every server, or, if that is more than a part of the bucket, the whole bucket as without this mode. The servers' loader
is `slimrl.engines.sglang.weight_loaders.load_changes`.

With --update-weight-transport disk the changes are files (`transport_disk.ChangedFilesTransport`).

Wire format: of each tensor the gaps between changed elements (uint16, one less than the distance; farther elements have
unchanged ones between them) and their new values. Both sides hash the bytes with XXH3 (128 bits). After a failed update
the next attempt sends whole buckets.
"""

from __future__ import annotations

import base64
import functools
import json
import pickle
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from slimrl.engines.server_protocol import WeightControl
from slimrl.weights.delta_files import LARGEST_PART, TensorDelta, changed_elements
from slimrl.weights.update.buckets import Bucket, BufferAllocator, Entry, Transport
from slimrl.weights.update.engine_fanout import collect_results
from slimrl.weights.update.transport_disk import ChangedFilesTransport
from slimrl.weights.update.transport_tensor import Rebuilt
from slimrl.weights.update.weight_updater import WeightUpdater

IN_BASE64 = 4 / 3  # bytes of the call for each byte


def serialize(deltas: Sequence[TensorDelta]) -> str:
    """SGLang's payload of named tensors: a description in JSON, all gaps, and all values as bytes."""
    gaps = b"".join(delta.gaps.tobytes() for delta in deltas)
    values = b"".join(delta.values.tobytes() for delta in deltas)
    described = {
        "checksum": xxhash.xxh3_128_hexdigest(gaps + values),
        "tensors": [
            {
                "name": delta.name,
                "shape": delta.shape,
                "dtype": str(delta.dtype).removeprefix("torch."),
                "sent": len(delta.gaps),
            }
            for delta in deltas
        ],
    }
    parts = {"described": json.dumps(described).encode(), "gaps": gaps, "values": values}
    make = functools.partial(torch.frombuffer, dtype=torch.uint8)
    # a buffer must not be empty
    named = [(name, Rebuilt(make, (bytearray(data + b"\0"),))) for name, data in parts.items()]
    return base64.b64encode(pickle.dumps(named, protocol=5)).decode("ascii")


class DeltaTransport:
    """Sends changes to all `servers`, and whole buckets through `inner`, which reaches the same servers."""

    def __init__(
        self, inner: Transport, servers: Sequence[WeightControl], engine_sizes: Sequence[int], fused: Collection[str]
    ) -> None:
        """`engine_sizes` are the servers' tensor-parallel sizes.

        `fused` are the tensors that the servers need in one call with the next one.
        """
        self.saved_bytes = 0  # of the buckets of an update, by sending changes
        self._inner = inner
        self._servers, self._sizes, self._fused = list(servers), list(engine_sizes), fused
        self._pool = ThreadPoolExecutor(max_workers=len(self._servers), thread_name_prefix="weight-changes")
        self._sent: list[tuple[tuple[Entry, ...], Tensor]] = []  # of the last complete update
        self._taken: list[tuple[tuple[Entry, ...], Tensor]] = []  # of this one
        self._calls: list[Future[None]] | None = None

    @property
    def buffer(self) -> BufferAllocator:
        """See `Transport.buffer`."""
        return self._inner.buffer

    def opens(self, tensor: Tensor) -> bool:
        """See `Transport.opens`."""
        return False

    def start(self, bucket: Bucket) -> None:
        """Starts sending the changes of a bucket, or the bucket."""
        number, flat = len(self._taken), bucket.flat.to("cpu", copy=True)
        self._taken.append((bucket.entries, flat))
        payload = self._payload(number) if number < len(self._sent) else None
        sent = 0 if payload is None else len(payload) * max(self._sizes)  # the call has it once for each rank
        if payload is None or sent > LARGEST_PART * bucket.nbytes:
            self._inner.start(bucket)
            return
        self.saved_bytes += bucket.nbytes - sent
        self._calls = [
            self._pool.submit(server.update_weights_from_changes, [payload] * size)
            for server, size in zip(self._servers, self._sizes, strict=True)
        ]

    def _payload(self, number: int) -> str | None:
        """None if the bucket has other tensors than that of the last update, or too many changes."""
        (entries, new), (before, old) = self._taken[number], self._sent[number]
        if [(entry.name, entry.start, entry.end) for entry in entries] != [(e.name, e.start, e.end) for e in before]:
            return None
        deltas = list(_deltas(entries, old, new))
        sent = sum(delta.gaps.nbytes + delta.values.nbytes for delta in deltas)
        if sent * IN_BASE64 * max(self._sizes) > LARGEST_PART * new.nbytes:
            return None
        return serialize([delta for delta, wanted in zip(deltas, _wanted(deltas, self._fused), strict=True) if wanted])

    def finish(self) -> None:
        """See `Transport.finish`."""
        calls, self._calls = self._calls, None
        if calls is None:
            self._inner.finish()
        else:
            collect_results(self._servers, calls, "applying changed weights")

    def release(self) -> None:
        """Every server has the weights: the next update sends what differs from them."""
        self._sent, self._taken = self._taken, []
        self._inner.release()

    def reset(self) -> None:
        """See `Transport.reset`; the servers may have any mixture of weights."""
        self._sent, self._taken, self._calls = [], [], None
        self._inner.reset()

    def close(self) -> None:
        """See `Transport.close`."""
        self._pool.shutdown()
        self._inner.close()

    def leave(self) -> None:
        """See `Transport.leave`."""
        self._inner.leave()


def _deltas(entries: Sequence[Entry], old: Tensor, new: Tensor) -> Iterator[TensorDelta]:
    for entry in entries:
        before, after = (flat[entry.start : entry.end].view(entry.dtype) for flat in (old, new))
        yield changed_elements(entry.name, entry.shape, before, after)


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
    """A `WeightUpdater` for engines on GPUs of their own, by calls and broadcasts or by files (`disk`)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """As `WeightUpdater`."""
        super().__init__(*arguments, **options)
        fused = set(self._source.family.names_with_next(self._source.spec))
        self._deltas = [
            one
            if isinstance(one, ChangedFilesTransport)
            else DeltaTransport(one, self._servers, self._engine_sizes, fused)
            for one in self._transports
        ]
        self._transports = self._deltas

    def _send(self, model: nn.Module | Sequence[nn.Module]) -> tuple[int, int]:
        for transport in self._deltas:
            transport.saved_bytes = 0
        num_bytes, buckets = super()._send(model)
        return num_bytes - sum(transport.saved_bytes for transport in self._deltas), buckets
