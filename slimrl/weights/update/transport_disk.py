"""Weights to servers through files: one Hugging Face folder per weight update on storage that both sides see.

Trainer rank 0 writes; a function of the user's may then see the files on every rank; servers read the finished folder,
which is removed once all have. Several runs may share `--update-weight-disk-dir`: each writes into a folder of its own
there, which goes with the run.
"""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slimrl.hooks import HookFailedError, UpdateWeightPostWrite, named
from slimrl.platform.collective_errors import RankSync
from slimrl.weights.safetensors_writer import INDEX_NAME, Shard, ShardWriter, TensorSpec, index_text, shard_of
from slimrl.weights.update.buckets import Bucket, ReusedBuffer
from slimrl.weights.update.engine_control import ServerControl, WeightSyncError, on_all
from slimrl.weights.update.topology import EngineEndpoint

if TYPE_CHECKING:
    from slimrl.arguments import Arguments


class DiskTransport:
    """Writes buckets into `<folder>/slimrl-<machine>-<process>-<random>/weight_v000001`, a file each.

    `begin` names the version, `start` writes, `deliver` has the servers load.
    """

    def __init__(self, servers: list[ServerControl], folder: Path, device: torch.device) -> None:
        self.buffer = ReusedBuffer(device)
        self._servers = servers
        # the name says whose folder it is, to whoever finds one that a killed run left
        self._own = Path(folder) / f"slimrl-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._written: list[Shard] = []
        self.folder = self._own / "weights"

    def begin(self, version: str) -> None:
        """The next weight update writes into a folder of its own."""
        self.folder = self._own / f"weight_v{version:0>6}"

    def start(self, bucket: Bucket) -> None:
        """Writes a bucket; raises OSError where the folder cannot be written."""
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        shard = shard_of(
            f"model-{len(self._written) + 1:05d}.safetensors",
            [TensorSpec(entry.name, entry.dtype, entry.shape) for entry in bucket.entries],
        )
        self._written.append(shard)
        with ShardWriter(folder, [shard]) as writer:
            for name, tensor in bucket.tensors():
                writer.write(name, tensor.cpu())
        if bucket.last:
            (folder / INDEX_NAME).write_text(index_text(self._written), encoding="utf-8")

    def deliver(self) -> None:
        """Returns once every server has loaded the folder, which is gone then. Raises WeightSyncError naming others."""
        folder = self.folder
        on_all(
            self._servers,
            lambda server: server.update_weights_from_disk(str(folder), weight_version=None, flush_cache=False),
            f"loading weights from {folder}",
        )
        shutil.rmtree(folder)
        self._written = []

    def finish(self) -> None:
        """Nothing is in progress: `start` returns when the bucket is written."""

    def release(self) -> None:
        """Nothing is kept: servers with pipeline stages are not sent to in this way."""

    def reset(self) -> None:
        """Removes the files of a weight update that failed."""
        self._written = []
        shutil.rmtree(self._own, ignore_errors=True)

    def close(self) -> None:
        """Removes the run's own folder."""
        self.reset()

    def leave(self) -> None:
        """Nothing: there are no groups."""


class Delivery:
    """What is between the last written file and the servers that read it, on every trainer rank.

    `transport` is that of the lead, None on the others; `post_write` is called with the folder on each.
    """

    def __init__(
        self, ranks: RankSync, transport: DiskTransport | None, post_write: Callable[[Path], None] | None
    ) -> None:
        self._ranks = ranks
        self._transport = transport
        self._post_write = post_write

    def begin(self, version: str) -> None:
        """Before the first bucket of an attempt."""
        if self._transport is not None:
            self._transport.begin(version)

    def finish(self) -> None:
        """After the last; collective. Raises WeightSyncError on every rank, for a function that failed finally."""
        if self._post_write is not None:
            folder = self._ranks.run_on_rank_zero(lambda: str(self._lead.folder))
            self._ranks.run_on_all_ranks(lambda: self._shown(Path(folder)))
        self._ranks.run_on_rank_zero(lambda: self._lead.deliver())

    @property
    def _lead(self) -> DiskTransport:
        assert self._transport is not None
        return self._transport

    def _shown(self, folder: Path) -> None:
        try:
            if self._post_write is not None:
                self._post_write(folder)
        except HookFailedError as error:
            raise WeightSyncError(str(error), final=True) from error


def post_write(args: Arguments, engines: Sequence[EngineEndpoint]) -> Callable[[Path], None] | None:
    """What `--custom-update-weight-post-write-path` asks for."""
    path = args.custom_update_weight_post_write_path
    if path is None:
        return None
    function = named("--custom-update-weight-post-write-path", path, UpdateWeightPostWrite)
    return lambda folder: function(args, folder, list(engines))
