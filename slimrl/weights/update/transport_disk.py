"""Weight transport through files: one Hugging Face folder per weight update, on storage that both sides can access.

Trainer rank 0 writes the folder; a custom function may then run on it on every rank; the servers read it, and it is
removed. Several runs may share `--update-weight-disk-dir`: each writes into its own subfolder, which it removes at its
end.
"""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from slimrl.engines.server_protocol import WeightControl
from slimrl.hooks import HookFailedError, UpdateWeightPostWrite, named
from slimrl.hooks.contracts import RunArguments
from slimrl.platform.collective_errors import RankSync
from slimrl.weights.hf_checkpoint_writer import INDEX_NAME, Shard, ShardWriter, TensorSpec, index_text, shard_of
from slimrl.weights.update.buckets import Bucket, ReusedBuffer
from slimrl.weights.update.engine_fanout import EngineCalls, WeightSyncError, load_from_disk
from slimrl.weights.update.topology import EngineEndpoint


class DiskTransport:
    """Writes one file per bucket into `<folder>/slimrl-<machine>-<process>-<random>/weight_v000001`.

    `begin` sets the version, `start` writes a bucket, `deliver` makes the servers load the folder.
    """

    def __init__(self, servers: list[WeightControl], folder: Path, device: torch.device) -> None:
        self.buffer = ReusedBuffer(device)
        self._servers = servers
        # the name identifies the process, in case a killed run leaves the folder behind
        self._own = Path(folder) / f"slimrl-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._written: list[Shard] = []
        self.folder = self._own / "weights"

    def begin(self, version: str) -> None:
        """Sets the folder of the next weight update."""
        self.folder = self._own / f"weight_v{version:0>6}"

    def start(self, bucket: Bucket) -> None:
        """Writes a bucket; raises OSError if the folder cannot be written."""
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
        """Makes every server load the folder, then removes it. Raises WeightSyncError naming failed servers."""
        load_from_disk(self._servers, str(self.folder))
        self.remove()

    def remove(self) -> None:
        """Removes the folder, which every server has loaded."""
        shutil.rmtree(self.folder)
        self._written = []

    def opens(self, tensor: torch.Tensor) -> bool:
        """See `Transport.opens`."""
        return False

    def finish(self) -> None:
        """Does nothing: `start` returns when the bucket is written."""

    def release(self) -> None:
        """Does nothing: servers with pipeline stages do not use this transport."""

    def reset(self) -> None:
        """Removes the files of a weight update that failed."""
        self._written = []
        shutil.rmtree(self._own, ignore_errors=True)

    def close(self) -> None:
        """Removes the run's own folder."""
        self.reset()

    def leave(self) -> None:
        """Does nothing: there are no process groups."""


class Delivery:
    """The collective steps between the last written file and the servers' load, on every trainer rank.

    `transport` is that of rank 0, None on the others; `post_write` is called with the folder on each rank. `calls` are
    those of the update: where they are divided over the ranks, so are the calls that load.
    """

    def __init__(
        self,
        ranks: RankSync,
        calls: EngineCalls,
        transport: DiskTransport | None,
        post_write: Callable[[Path], None] | None,
    ) -> None:
        self._ranks = ranks
        self._calls = calls
        self._transport = transport
        self._post_write = post_write

    def begin(self, version: str) -> None:
        """Called before the first bucket of an attempt."""
        if self._transport is not None:
            self._transport.begin(version)

    def finish(self) -> None:
        """Called after the last bucket; collective. Raises WeightSyncError on every rank; a failed hook is final."""
        folder = ""
        if self._post_write is not None or self._calls.divided:
            folder = self._ranks.run_on_rank_zero(lambda: str(self._lead.folder))
        if self._post_write is not None:
            self._ranks.run_on_all_ranks(lambda: self._call_post_write(Path(folder)))
        if not self._calls.divided:
            self._ranks.run_on_rank_zero(lambda: self._lead.deliver())  # in one round
            return
        self._calls.load_from_disk(folder)
        self._ranks.run_on_rank_zero(lambda: self._lead.remove())

    @property
    def _lead(self) -> DiskTransport:
        assert self._transport is not None
        return self._transport

    def _call_post_write(self, folder: Path) -> None:
        try:
            if self._post_write is not None:
                self._post_write(folder)
        except HookFailedError as error:
            raise WeightSyncError(str(error), final=True) from error


def post_write(
    path: str | None, engines: Sequence[EngineEndpoint], *, hook_args: RunArguments
) -> Callable[[Path], None] | None:
    """The function of `--custom-update-weight-post-write-path`, if any; `hook_args` is its first argument."""
    if path is None:
        return None
    function = named("--custom-update-weight-post-write-path", path, UpdateWeightPostWrite)
    return lambda folder: function(hook_args, folder, list(engines))
