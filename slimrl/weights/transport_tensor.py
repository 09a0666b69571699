"""Weights to servers on the same slots: buckets in shared memory, references by HTTP.

Every tensor-parallel rank of an engine gets the reference made by the trainer rank on its own slot; on the
CPU one reference serves all ranks. The trainer rank on an engine's first slot speaks to its server.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from slimrl.weights.buckets import Bucket
from slimrl.weights.servers import ServerControl, WeightSyncError, on_all
from slimrl.weights.shared_memory import CudaSharedBuffer, HostSharedBuffer, SharedBuffer, serialize

LOAD_FORMAT = "flattened_bucket"


@dataclasses.dataclass(frozen=True)
class EngineLink:
    """One engine and the trainer ranks that supply its memory, in the order of the engine's ranks.

    `group` is a gloo group of `members`, None where there is only one.
    """

    server: ServerControl
    tensor_parallel_size: int
    members: tuple[int, ...]
    group: dist.ProcessGroup | None

    def payloads(self, own: str) -> list[str] | None:
        """One payload per engine rank on the first member, None on the others; collective over the members."""
        if self.group is None:
            return [own] * self.tensor_parallel_size
        leads = dist.get_rank() == self.members[0]
        gathered: list[str] | None = [""] * len(self.members) if leads else None
        dist.gather_object(own, gathered, dst=self.members[0], group=self.group)
        return gathered

    def share_error(self, error: str | None) -> str | None:
        """The first member's error on every member; returns only once all of them have come here."""
        if self.group is None:
            return error
        box = [error]
        dist.broadcast_object_list(box, src=self.members[0], group=self.group)
        return box[0]


class TensorTransport:
    """Sends buckets to the engines that this rank supplies; the buckets must be packed into `buffer`."""

    def __init__(self, links: list[EngineLink], device: torch.device) -> None:
        self._links = links
        self.buffer: SharedBuffer = CudaSharedBuffer(device) if device.type == "cuda" else HostSharedBuffer()

    def send(self, bucket: Bucket, version: str | None) -> None:
        """Returns once every engine of this rank has copied the bucket; `version` goes with the last one.

        Collective over the members of each engine. Raises WeightSyncError, on all of them, naming the server.
        """
        led: list[tuple[ServerControl, list[str]]] = []
        for link in self._links:
            payloads = link.payloads(serialize(bucket, self.buffer))
            if payloads is not None:
                led.append((link.server, payloads))
        error = self._post(led, version)
        errors = [link.share_error(error) for link in self._links]
        failed = next((found for found in errors if found is not None), None)
        if failed is not None:
            raise WeightSyncError(failed)

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
