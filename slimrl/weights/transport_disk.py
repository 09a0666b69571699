"""Weights to servers through files: one Hugging Face folder per push on storage that both sides see.

Trainer rank 0 writes; servers read the finished folder, which is removed once all have. Several runs may share
`--update-weight-disk-dir`: each writes into a folder of its own there, which goes with the run.
"""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from pathlib import Path

import torch

from slimrl.weights.buckets import Bucket, ReusedBuffer
from slimrl.weights.hf_shards import INDEX_NAME, Shard, ShardWriter, TensorSpec, index_text, shard_of
from slimrl.weights.servers import ServerControl, on_all


class DiskTransport:
    """Writes buckets into `<folder>/slimrl-<machine>-<process>-<random>/weights`, a file each, for servers to load."""

    def __init__(self, servers: list[ServerControl], folder: Path, device: torch.device) -> None:
        self.buffer = ReusedBuffer(device)
        self._servers = servers
        # the name says whose folder it is, to whoever finds one that a killed run left
        self._own = Path(folder) / f"slimrl-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._written: list[Shard] = []

    def start(self, bucket: Bucket) -> None:
        """Writes a bucket; with the last one returns once every server has loaded the folder.

        Raises WeightSyncError naming a server that did not, OSError where the folder cannot be written.
        """
        folder = self._own / "weights"
        folder.mkdir(parents=True, exist_ok=True)
        shard = shard_of(
            f"model-{len(self._written) + 1:05d}.safetensors",
            [TensorSpec(entry.name, entry.dtype, entry.shape) for entry in bucket.entries],
        )
        self._written.append(shard)
        with ShardWriter(folder, [shard]) as writer:
            for name, tensor in bucket.tensors():
                writer.write(name, tensor.cpu())
        if not bucket.last:
            return
        (folder / INDEX_NAME).write_text(index_text(self._written), encoding="utf-8")
        on_all(
            self._servers,
            lambda server: server.update_weights_from_disk(str(folder), weight_version=None, flush_cache=False),
            f"loading weights from {folder}",
        )
        shutil.rmtree(folder)
        self._written = []

    def finish(self) -> None:
        """Nothing is under way: `start` returns when the bucket is written."""

    def release(self) -> None:
        """Nothing is kept: servers with pipeline stages are not sent to in this way."""

    def reset(self) -> None:
        """Removes the files of a push that failed."""
        self._written = []
        shutil.rmtree(self._own, ignore_errors=True)

    def close(self) -> None:
        """Removes the run's own folder."""
        self.reset()
