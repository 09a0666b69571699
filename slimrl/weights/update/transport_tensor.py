"""Weight transport to servers on the same GPUs: buckets in shared memory, references to them over HTTP.

On the CPU a trainer whose weights are in shared memory (`megatron.data_parallel.share_weights`) packs only tensors that
it must gather or reorder. For all others the servers get references to the weights themselves, which no step changes
before every server has them.

On CUDA an engine rank gets the reference of the trainer rank on the same GPU, on the CPU that of a trainer rank on its
node. The trainer rank of an engine's first rank calls the server. The server responds when it has read the bucket,
except for later pipeline stages: the memory is kept for them until `release`.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import itertools
import json
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.engines.server_protocol import WeightControl
from slimrl.weights.delta_files import ANSWERS, APPLIED
from slimrl.weights.update.buckets import Bucket, Entry
from slimrl.weights.update.engine_fanout import WeightSyncError, collect_results
from slimrl.weights.update.shared_memory import (
    CudaSharedBuffer,
    HostSharedBuffer,
    Reference,
    SharedBuffer,
    SharedDoubleBuffer,
    shared_file,
)


class Rebuilt:
    """Unpickles as the result of a function call; the receiver does not need this class."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self._call = (function, tuple(arguments))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def serialize_call(call: Mapping[str, Any]) -> str:
    """SGLang's payload of one tensor named "call": what one of slimrl's loaders in the server is to do, as JSON."""
    make = functools.partial(torch.frombuffer, dtype=torch.uint8)
    named = [("call", Rebuilt(make, (bytearray(json.dumps(call).encode()),)))]
    return base64.b64encode(pickle.dumps(named, protocol=5)).decode("ascii")


def serialize(bucket: Bucket, references: Sequence[Reference]) -> str:
    """The bucket as SGLang's "flattened_bucket" payload: a pickle in base64 that holds references, no weights.

    With several references, which must call the same function, each receiver opens the one of its rank in its own
    torch.distributed world. The pickle uses only classes of torch and the standard library, which the server's
    unpickler allows.
    """
    payload = {
        "flattened_tensor": Rebuilt(*references[0]) if len(references) == 1 else _of_own_rank(references),
        "metadata": [described(entry) for entry in bucket.entries],
    }
    return base64.b64encode(pickle.dumps(payload)).decode("ascii")


def serialize_changes(bucket: Bucket, references: Sequence[Reference], answer: int) -> str:
    """A bucket of changes as SGLang's list of named tensors; `answer` is the place of the receiver's byte.

    `references` as in `serialize`.
    """
    flat = Rebuilt(*references[0]) if len(references) == 1 else _of_own_rank(references)
    places = {entry.name: (entry.start, entry.end) for entry in bucket.entries}
    start, _ = places[ANSWERS]
    places[ANSWERS] = start + answer, start + answer + 1
    named = [(name, Rebuilt(torch.as_strided, (flat, (e - s,), (1,), s))) for name, (s, e) in places.items()]
    return base64.b64encode(pickle.dumps(named)).decode("ascii")


def _of_own_rank(references: Sequence[Reference]) -> Rebuilt:
    """Unpickles as the opened reference of the receiver's rank; the others are not opened, because that would fail."""
    function = references[0][0]
    arguments = [arguments for _, arguments in references]
    from_own_rank = Rebuilt(itertools.islice, (arguments, Rebuilt(dist.get_rank, ()), None))
    return Rebuilt(next, (Rebuilt(itertools.starmap, (function, from_own_rank)),))


def described(entry: Entry) -> types.SimpleNamespace:
    """The entry as SGLang's metadata of a tensor in a flat bucket."""
    return types.SimpleNamespace(
        name=entry.name,
        shape=entry.shape,
        dtype=entry.dtype,
        start_idx=entry.start,
        end_idx=entry.end,
        numel=entry.end - entry.start,  # in bytes: the flat tensor is uint8
    )


def serialize_named(bucket: Bucket, own: Reference) -> str:
    """The bucket as SGLang's list of named tensors, of which some are in the bucket's file and some in other files."""
    _, (path, _, size) = own
    files: dict[tuple[str, torch.dtype], Rebuilt] = {}

    def opened(path: str, size: int, dtype: torch.dtype) -> Rebuilt:
        """The whole file as one tensor, opened once per payload."""
        mapped = functools.partial(torch.from_file, dtype=dtype)
        return files.setdefault((path, dtype), Rebuilt(mapped, (path, True, size // dtype.itemsize)))

    named = []
    for entry in bucket.entries:
        if entry.shared is None:
            flat, first = opened(path, size, entry.dtype), entry.start // entry.dtype.itemsize
            strides = torch.empty(entry.shape, device="meta").stride()
        else:
            file, storage = shared_file(entry.shared), entry.shared.untyped_storage()
            assert file is not None  # checked by `TensorTransport.opens`
            flat, first = opened(file, storage.nbytes(), entry.dtype), int(entry.shared.storage_offset())
            strides = entry.shared.stride()
        named.append((entry.name, Rebuilt(torch.as_strided, (flat, entry.shape, strides, first))))
    return base64.b64encode(pickle.dumps(named)).decode("ascii")


LOAD_FORMAT = "flattened_bucket"


@dataclasses.dataclass(frozen=True)
class EngineLink:
    """One engine and, for each of its ranks, the trainer rank that sends to it.

    `group` is a gloo group of the senders, None if there is only one. `first` is the number of the engine's first rank
    among the ranks of all engines.
    """

    server: WeightControl
    tensor_parallel_size: int
    senders: tuple[int, ...]
    group: dist.ProcessGroup | None
    first: int = 0

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
        if bucket.changes:
            return [serialize_changes(bucket, [by_engine_rank[n]], self.first + n) for n in range(size)]
        if bucket.has_shared:  # then there is one sender
            return [serialize_named(bucket, own)] * size
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
        self.changes_buffer = make()
        self._changes: Bucket | None = None  # in flight
        self._refused: list[str] = []  # engine ranks that did not apply changes

    def opens(self, tensor: Tensor) -> bool:
        """See `Transport.opens`; servers of several senders open only buckets."""
        return all(link.group is None for link in self._links) and shared_file(tensor) is not None

    def start(self, bucket: Bucket) -> None:
        """Sends every engine of this rank a reference to the bucket; collective over the senders of each engine."""
        self._calls = []
        self._changes = bucket if bucket.changes else None
        reference = (self.changes_buffer if bucket.changes else self.buffer).reference()
        for link in self._links:
            payloads = link.payloads(bucket, reference)
            if payloads is not None:
                self._calls.append((link.server, self._pool.submit(_load, link.server, bucket, payloads)))

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
        if self._changes is not None:
            self._refused += self._without_answer(self._changes)

    def _without_answer(self, bucket: Bucket) -> list[str]:
        """The engine ranks that read the changes in this rank's memory, and did not answer that they applied them."""
        answers = dict(bucket.tensors())[ANSWERS].tolist()
        own = dist.get_rank() if dist.is_initialized() else 0
        return [
            f"{link.server.url} (rank {number})"
            for link in self._links
            for number, sender in enumerate(link.senders)
            if sender == own and answers[link.first + number] != APPLIED
        ]

    def check_changes(self) -> None:
        """Raises WeightSyncError naming the servers that could not apply changes, whose last bucket has been sent.

        Not earlier: the other senders of an engine wait for this rank until then.
        """
        refused, self._refused = self._refused, []
        if refused:
            raise WeightSyncError(f"changes of weights were not applied by {', '.join(refused)}: see the server's log")

    def release(self) -> None:
        """Frees memory kept for later pipeline stages, after all of them have read it."""
        self.buffer.release()

    def reset(self) -> None:
        """Drops the calls of a failed weight update; keeps memory that later pipeline stages may still read."""
        self._calls, self._changes, self._refused = None, None, []

    def close(self) -> None:
        """Frees the shared memory."""
        self._pool.shutdown()
        self.buffer.close()
        self.changes_buffer.close()

    def leave(self) -> None:
        """Leaves the process groups of senders."""
        for link in self._links:
            if link.group is not None:
                dist.destroy_process_group(link.group)


def _load(server: WeightControl, bucket: Bucket, payloads: list[str]) -> None:
    if bucket.changes:
        server.update_weights_from_changes(payloads)
        return
    load_format = None if bucket.has_shared else LOAD_FORMAT
    server.update_weights_from_tensor(payloads, load_format=load_format, weight_version=None, flush_cache=False)
