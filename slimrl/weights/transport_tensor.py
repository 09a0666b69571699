"""Weights to servers on the same slots: buckets in shared memory, references by HTTP.

Every rank of an engine gets the reference made by the trainer rank that shares its memory: on CUDA the one on its own
slot, on the CPU one of its node. The trainer rank that serves an engine's first rank speaks to its server.

A server has read a bucket when it answers, except for later pipeline stages: for engines that have them the memory is
kept until `release`.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from slimrl.weights.buckets import Bucket
from slimrl.weights.servers import ServerControl, WeightSyncError, on_all
from slimrl.weights.shared_memory import CudaSharedBuffer, HostSharedBuffer, Reference, SharedBuffer, serialize

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

    def share_error(self, error: str | None) -> str | None:
        """The leader's error on every supplier; returns only once all of them have come here."""
        if self.group is None:
            return error
        box = [error]
        dist.broadcast_object_list(box, src=self.leader, group=self.group)
        return box[0]


class TensorTransport:
    """Sends buckets to the engines that this rank supplies; the buckets must be packed into `buffer`."""

    def __init__(self, links: list[EngineLink], device: torch.device) -> None:
        self._links = links
        keep = any(link.has_stages for link in links)
        self.buffer: SharedBuffer = CudaSharedBuffer(device) if device.type == "cuda" else HostSharedBuffer(keep=keep)

    def send(self, bucket: Bucket, version: str | None) -> None:
        """Returns once every engine of this rank has copied the bucket; `version` goes with the last one.

        Of an engine with pipeline stages the first has. Collective over the suppliers of each engine. Raises
        WeightSyncError, on all of them, naming the server.
        """
        led: list[tuple[ServerControl, list[str]]] = []
        for link in self._links:
            payloads = link.payloads(bucket, self.buffer.reference())
            if payloads is not None:
                led.append((link.server, payloads))
        error = self._post(led, version)
        errors = [link.share_error(error) for link in self._links]
        failed = next((found for found in errors if found is not None), None)
        if failed is not None:
            raise WeightSyncError(failed)

    def release(self) -> None:
        """Gives up what was kept for later pipeline stages: every one has read it."""
        self.buffer.release()

    def close(self) -> None:
        """Gives the shared memory up."""
        self.buffer.close()

    @staticmethod
    def _post(led: list[tuple[ServerControl, list[str]]], version: str | None) -> str | None:
        by_url = {server.url: payloads for server, payloads in led}
        try:
            on_all(
                [server for server, _ in led],
                lambda server: server.update_weights_from_tensor(
                    by_url[server.url], load_format=LOAD_FORMAT, weight_version=version, flush_cache=False
                ),
                "updating weights from shared tensors",
            )
        except WeightSyncError as error:
            return str(error)
        return None
