"""Weight transport of LoRA adapters: their values in one HTTP call to each server, which keeps its own base.

The servers hold the weights of --hf-checkpoint beside the adapter, so an update has a few megabytes for a model of many
gigabytes. Requests name the adapter (`models.adapters.ADAPTER_NAME`); others use the base.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from slimrl.engines.server_protocol import WeightControl
from slimrl.models.adapters import ADAPTER_NAME
from slimrl.weights.update.buckets import Bucket, Entry, ReusedBuffer
from slimrl.weights.update.engine_fanout import call_all
from slimrl.weights.update.transport_tensor import Rebuilt, described


class AdapterTransport:
    """Trainer rank 0 collects the buckets and sends all of them to every server with the last one."""

    def __init__(
        self,
        servers: Sequence[WeightControl],
        engine_sizes: Sequence[int],
        config: dict[str, Any],
        device: torch.device,
    ) -> None:
        """`engine_sizes` are the servers' tensor-parallel sizes; `config` is PEFT's of the adapters."""
        self.buffer = ReusedBuffer(device)
        self.with_checksums = False  # whether each server compares SHA-256 of its tensors
        self._servers = list(servers)
        self._sizes = {server.url: size for server, size in zip(servers, engine_sizes, strict=True)}
        self._config = config
        self._entries: list[Entry] = []
        self._data = bytearray()

    def start(self, bucket: Bucket) -> None:
        """Keeps the bucket; the last one is sent with all others. Raises WeightSyncError naming each failed server."""
        offset = len(self._data)
        for entry in bucket.entries:
            self._entries.append(dataclasses.replace(entry, start=entry.start + offset, end=entry.end + offset))
        self._data += bucket.flat.cpu().numpy().data
        if not bucket.last:
            return
        payload, checksums = serialize(self._entries, self._data), None
        if self.with_checksums:
            parts = {entry.name: self._data[entry.start : entry.end] for entry in self._entries}
            checksums = {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()}
        self.reset()
        call_all(
            self._servers,
            lambda server: server.load_adapter(
                ADAPTER_NAME, self._config, [payload] * self._sizes[server.url], checksums
            ),
            "loading adapters",
        )

    def opens(self, tensor: torch.Tensor) -> bool:
        """See `Transport.opens`."""
        return False

    def finish(self) -> None:
        """Does nothing: `start` returns when every server has the adapter."""

    def release(self) -> None:
        """Does nothing: engines with pipeline stages do not use this transport."""

    def reset(self) -> None:
        """Drops the buckets of an update."""
        self._entries, self._data = [], bytearray()

    def close(self) -> None:
        """Does nothing: nothing stays open between updates."""

    def leave(self) -> None:
        """Does nothing: there are no process groups."""


def serialize(entries: Sequence[Entry], data: bytearray) -> str:
    """SGLang's "flattened_bucket" payload with the values themselves: a pickle in base64."""
    flat = Rebuilt(functools.partial(torch.frombuffer, dtype=torch.uint8), (data,))
    payload = {"flattened_tensor": flat, "metadata": [described(entry) for entry in entries]}
    return base64.b64encode(pickle.dumps(payload, protocol=5)).decode("ascii")
