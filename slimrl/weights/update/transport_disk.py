"""Weight transport through files: one Hugging Face folder per weight update, on storage that both sides can access.

Trainer rank 0 writes the folder; a custom function may then run on it on every rank; the servers read it, and it is
removed. Several runs may share `--update-weight-disk-dir`: each writes into its own subfolder, which it removes at its
end. `transport_changed_files` writes what changed instead of everything.

SGLang's own call for files answers for a server's first rank alone. So the ranks of the run's SGLang servers load by
slimrl's loader, and each answers in the folder (`EveryRankLoads`). vLLM's servers answer for all of their ranks.
External SGLang servers have no loader of slimrl: their first rank answers, and the folder stays until every rank has
read it (`EveryRankWaits`); without it a rank would look for the folder's name on a hub, and end its server.
"""

from __future__ import annotations

import base64
import dataclasses
import os
import pickle
import shutil
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from slimrl.engines.protocol import EngineError
from slimrl.engines.server_protocol import WeightControl
from slimrl.hooks import HookFailedError, UpdateWeightPostWrite, named
from slimrl.hooks.contracts import RunArguments
from slimrl.platform.collective_errors import RankSync
from slimrl.weights.hf_checkpoint_writer import INDEX_NAME, Shard, ShardWriter, TensorSpec, index_text, shard_of
from slimrl.weights.local_checkpoint import read_answer
from slimrl.weights.update.buckets import Bucket, ReusedBuffer
from slimrl.weights.update.engine_fanout import EngineCalls, LoadFolder, WeightSyncError, call_all, load_from_disk
from slimrl.weights.update.topology import EngineEndpoint
from slimrl.weights.update.transport_tensor import serialize_call


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

    def deliver(self, load: LoadFolder = load_from_disk) -> None:
        """Makes every server load the folder, then removes it. Raises WeightSyncError naming failed servers."""
        load(self._servers, str(self.folder))
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


NO_TENSORS = base64.b64encode(pickle.dumps([])).decode("ascii")  # SGLang's payload of a rank
ANSWER_TIMEOUT_S = 120.0  # after the call, on a network file system


@dataclasses.dataclass(frozen=True)
class EveryRankLoads:
    """Makes every rank of servers with slimrl's loader load a published folder, and answer in it.

    With `local` each rank first brings the checkpoint in that folder of its own host to the version, and loads that
    (`weights.local_checkpoint`). `sizes` has the ranks of each server by its URL.
    """

    sizes: Mapping[str, int]
    local: Path | None = None
    timeout_s: float = ANSWER_TIMEOUT_S

    @classmethod
    def of(cls, servers: Sequence[WeightControl], sizes: Sequence[int], local: Path | None = None) -> EveryRankLoads:
        """For servers of so many ranks."""
        return cls({server.url: size for server, size in zip(servers, sizes, strict=True)}, local)

    def __call__(self, servers: Sequence[WeightControl], folder: str) -> None:
        """Raises WeightSyncError naming every server that failed."""
        published, through = Path(folder), "" if self.local is None else f" through {self.local}"
        call_all(servers, lambda server: self._load(server, published), f"loading weights from {folder}{through}")

    def _load(self, server: WeightControl, published: Path) -> None:
        name, size = uuid.uuid4().hex[:12], self.sizes[server.url]
        local = None if self.local is None else str(self.local)
        call = {"published": str(published.absolute()), "local": local, "server": name}
        server.pull_weights([serialize_call(call)] * size)
        errors = []
        for rank in range(size):
            try:
                errors.append(read_answer(published, name, rank, self.timeout_s))
            except TimeoutError as error:
                errors.append(f"{error}: the log of the server has the reason")
        if failed := sorted({error for error in errors if error is not None}):
            raise EngineError("; ".join(failed))


@dataclasses.dataclass(frozen=True)
class EveryRankWaits:
    """Makes servers load a folder by SGLang's own call, and returns when every rank has.

    An update from no tensors follows, which the ranks of a server begin after the load and end together.
    """

    sizes: Mapping[str, int]

    @classmethod
    def of(cls, servers: Sequence[WeightControl], sizes: Sequence[int]) -> EveryRankWaits:
        """For servers of so many ranks."""
        return cls({server.url: size for server, size in zip(servers, sizes, strict=True)})

    def __call__(self, servers: Sequence[WeightControl], folder: str) -> None:
        """Raises WeightSyncError naming every server that failed."""
        load_from_disk(servers, folder)
        several = [server for server in servers if self.sizes[server.url] > 1]
        call_all(several, self._wait, f"loading weights from {folder} on every rank")

    def _wait(self, server: WeightControl) -> None:
        nothing = [NO_TENSORS] * self.sizes[server.url]
        server.update_weights_from_tensor(nothing, load_format=None, weight_version=None, flush_cache=False)


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
        load: LoadFolder = load_from_disk,
    ) -> None:
        self._load = load
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
            self._ranks.run_on_rank_zero(lambda: self._lead.deliver(self._load))  # in one round
            return
        self._calls.load_from_disk(folder, self._load)
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
