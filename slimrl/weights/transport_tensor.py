"""Weights to servers on the same slots: buckets in shared memory, references by HTTP.

Every rank of an engine gets the reference made by the trainer rank that shares its memory: on CUDA the one on its own
slot, on the CPU one of its node. The trainer rank that serves an engine's first rank speaks to its server.

A server has read a bucket when it answers, except for later pipeline stages: for engines that have them the memory is
kept until `release`.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist

from slimrl.weights.buckets import Bucket
from slimrl.weights.servers import ServerControl, WeightSyncError, results
from slimrl.weights.shared_memory import (
    CudaSharedBuffer,
    HostSharedBuffer,
    Reference,
    SharedBuffer,
    TwoSharedInTurn,
    serialize,
)

LOAD_FORMAT = "flattened_bucket"


@dataclasses.dataclass(frozen=True)
class EngineLink:
    """One engine and, for each of its ranks, the trainer rank that supplies its memory.

    `group` is a gloo group of the suppliers, None where there is only one.
    """

    server: ServerControl
    tensor_parallel_size: int
    suppliers: tuple[int, ...]
    group: dist.ProcessGroup | None

    @property
    def leader(self) -> int:
        """The trainer rank that speaks to the server."""
        return self.suppliers[0]

    @property
    def has_stages(self) -> bool:
        """Whether the engine has pipeline stages, each of `tensor_parallel_size` ranks."""
        return len(self.suppliers) > self.tensor_parallel_size

    def payloads(self, bucket: Bucket, own: Reference) -> list[str] | None:
        """One payload per tensor-parallel rank on the leader, None on the others; collective over the suppliers."""
        references = self._references(own)
        if references is None:
            return None
        of_ranks = [references[rank] for rank in self.suppliers]
        size = self.tensor_parallel_size
        if self.has_stages and len(references) > 1:
            # SGLang gives every stage the same payloads: each rank finds its own reference among all of them
            return [serialize(bucket, of_ranks)] * size
        return [serialize(bucket, [reference]) for reference in of_ranks[:size]]

    def _references(self, own: Reference) -> dict[int, Reference] | None:
        """By trainer rank, on the leader."""
        if self.group is None:
            return {self.leader: own}
        members = sorted(set(self.suppliers))
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

        self.buffer: SharedBuffer = TwoSharedInTurn(make(), make())

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
        error = None
        try:
            results([s for s, _ in calls], [call for _, call in calls], "updating weights from shared tensors")
        except WeightSyncError as failed:
            error = failed
        errors = [link.share_error(error) for link in self._links]
        failed = next((found for found in errors if found is not None), None)
        if failed is not None:
            raise failed

    def release(self) -> None:
        """Gives up what was kept for later pipeline stages: every one has read it."""
        self.buffer.release()

    def reset(self) -> None:
        """Nothing is left by a failed push but memory that later stages may still read."""
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
