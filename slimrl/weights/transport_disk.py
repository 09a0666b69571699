"""Weights to servers through files: one Hugging Face folder per version on storage that both sides see.

Trainer rank 0 writes; servers read the finished folder, which is removed once all have.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from slimrl.weights.buckets import Bucket, ReusedBuffer
from slimrl.weights.hf_files import HfWriter
from slimrl.weights.servers import ServerControl, on_all


class DiskTransport:
    """Collects buckets into `<folder>/weight_v<version>` and has the servers load it with the last one."""

    def __init__(self, servers: list[ServerControl], folder: Path, device: torch.device) -> None:
        self.buffer = ReusedBuffer(device)
        self._servers = servers
        self._folder = Path(folder)
        self._writer: HfWriter | None = None

    def send(self, bucket: Bucket, version: str | None) -> None:
        """Adds a bucket; with the last one (that has a version) returns once every server has loaded the folder.

        Raises WeightSyncError naming a server that did not.
        """
        if self._writer is None:
            self._writer = HfWriter(self._folder / "weight_update", replace=True)
        for name, tensor in bucket.tensors():
            self._writer.add(name, tensor)
        if version is None:
            return
        self._writer.close()
        written, self._writer = self._writer.folder, None
        target = written.with_name(f"weight_v{version}")
        shutil.rmtree(target, ignore_errors=True)
        written.rename(target)
        on_all(
            self._servers,
            lambda server: server.update_weights_from_disk(str(target), weight_version=version, flush_cache=False),
            f"loading weights from {target}",
        )
        shutil.rmtree(target)

    def release(self) -> None:
        """Nothing is kept: servers with pipeline stages are not sent to in this way."""

    def close(self) -> None:
        """Nothing stays open between two pushes."""
