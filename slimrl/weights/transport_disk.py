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
from slimrl.weights.hf_files import HfWriter
from slimrl.weights.servers import ServerControl, on_all


class DiskTransport:
    """Collects buckets into `<folder>/slimrl-<machine>-<process>-<random>/weights` and has the servers load it."""

    def __init__(self, servers: list[ServerControl], folder: Path, device: torch.device, bucket_bytes: int) -> None:
        """`bucket_bytes` is also the size of the files: what is not yet written is held in host memory."""
        self.buffer = ReusedBuffer(device)
        self._servers = servers
        # the name says whose folder it is, to whoever finds one that a killed run left
        self._own = Path(folder) / f"slimrl-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._bucket_bytes = bucket_bytes
        self._writer: HfWriter | None = None

    def start(self, bucket: Bucket) -> None:
        """Adds a bucket; with the last one returns once every server has loaded the folder.

        Raises WeightSyncError naming a server that did not, OSError where the folder cannot be written.
        """
        if self._writer is None:
            self._writer = HfWriter(self._own / "weights", max_shard_bytes=self._bucket_bytes)
        for name, tensor in bucket.tensors():
            self._writer.add(name, tensor)
        if not bucket.last:
            return
        self._writer.close()
        target, self._writer = self._writer.folder, None
        on_all(
            self._servers,
            lambda server: server.update_weights_from_disk(str(target), weight_version=None, flush_cache=False),
            f"loading weights from {target}",
        )
        shutil.rmtree(target)

    def finish(self) -> None:
        """Nothing is under way: `start` returns when the bucket is copied."""

    def release(self) -> None:
        """Nothing is kept: servers with pipeline stages are not sent to in this way."""

    def reset(self) -> None:
        """Removes the files of a push that failed."""
        self._writer = None
        shutil.rmtree(self._own, ignore_errors=True)

    def close(self) -> None:
        """Removes the run's own folder."""
        self.reset()
