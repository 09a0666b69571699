"""Weight transport through files: one Hugging Face folder per weight update, on storage that both sides can access.

Trainer rank 0 writes the folder; a custom function may then run on it on every rank; the servers read it, and it is
removed. Several runs may share `--update-weight-disk-dir`: each writes into its own subfolder, which it removes at its
end.

With --update-weight-mode delta the folder has the tensors that changed since the last complete update
(`weights.delta_files`). Each engine host changes its local checkpoint by it, and the servers load that (`PulledLoad`).
The first update, and the attempt after a failed one, are full: so is that of a server that missed a version, because a
host without the base fails the attempt.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import os
import pickle
import shutil
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import safetensors.numpy
import torch
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.engines.protocol import EngineError
from slimrl.engines.server_protocol import WeightControl
from slimrl.hooks import HookFailedError, UpdateWeightPostWrite, named
from slimrl.hooks.contracts import RunArguments
from slimrl.platform.collective_errors import RankSync
from slimrl.weights import delta_files
from slimrl.weights.delta_files import LARGEST_PART, Change, TensorRow, VersionIndex
from slimrl.weights.hf_checkpoint_writer import (
    INDEX_NAME,
    Shard,
    ShardWriter,
    TensorSpec,
    companions,
    index_text,
    shard_of,
)
from slimrl.weights.local_checkpoint import MOST_THREADS, read_answer
from slimrl.weights.update.buckets import Bucket, Entry, ReusedBuffer
from slimrl.weights.update.engine_fanout import EngineCalls, LoadFolder, WeightSyncError, call_all, load_from_disk
from slimrl.weights.update.topology import EngineEndpoint
from slimrl.weights.update.transport_tensor import Rebuilt


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


@dataclasses.dataclass(frozen=True)
class ChangedFiles:
    """How changed weights are written (`delta_files`).

    `local` is the folder of the checkpoints on each engine's host, `origin` the Hugging Face folder whose other files
    (config.json, tokenizer) they get.
    """

    local: Path
    origin: Path
    encoding: str = delta_files.XOR
    checksum: str = "xxh3-128"

    @classmethod
    def from_args(cls, args: Arguments) -> ChangedFiles | None:
        """None with --update-weight-mode full."""
        if args.update_weight_mode != "delta":
            return None
        assert args.update_weight_local_checkpoint_dir is not None
        return cls(
            Path(args.update_weight_local_checkpoint_dir).absolute(),
            Path(args.hf_checkpoint),
            args.update_weight_delta_encoding or delta_files.XOR,
            args.update_weight_delta_checksum,
        )


class ChangedFilesTransport(DiskTransport):
    """Writes what changed since the last complete update, or all weights if there is none."""

    def __init__(self, servers: list[WeightControl], folder: Path, device: torch.device, changes: ChangedFiles) -> None:
        super().__init__(servers, folder, device)
        self.saved_bytes = 0  # of the buckets of an update, by writing changes
        self._changes = changes
        self._version = self._id = ""
        self._base: tuple[str, str] | None = None  # version and id of the last complete update
        self._sent: list[tuple[tuple[Entry, ...], Tensor]] = []  # its buckets
        self._taken: list[tuple[tuple[Entry, ...], Tensor]] = []  # those of this one
        self._rows: dict[str, TensorRow] = {}
        self._files: dict[str, str] = {}
        self._pool = ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))), "weight-changes")

    def begin(self, version: str) -> None:
        """See `DiskTransport.begin`."""
        super().begin(version)
        self._version, self._id = version, uuid.uuid4().hex[:12]
        self._taken, self._rows, self._files, self.saved_bytes = [], {}, {}, 0

    def start(self, bucket: Bucket) -> None:
        """Writes the changes of a bucket, or all of it; raises OSError if the folder cannot be written."""
        number, flat = len(self._taken), bucket.flat.to("cpu", copy=True)
        self._taken.append((bucket.entries, flat))
        names = [entry.name for entry in bucket.entries]
        if self._base is None:
            super().start(bucket)
            self._files.update(dict.fromkeys(names, self._written[-1].file))
            wholes = self._pool.map(lambda entry: self._whole(entry, flat).row, bucket.entries)
            self._rows.update(zip(names, wholes, strict=True))
        else:
            self._write_changes(number)
        if bucket.last:
            self._finish()

    def _whole(self, entry: Entry, flat: Tensor) -> Change:
        return delta_files.whole(flat[entry.start : entry.end].view(entry.dtype), self._changes.checksum)

    def _write_changes(self, number: int) -> None:
        entries, new = self._taken[number]
        before, old = self._sent[number] if number < len(self._sent) else ((), new)
        found: list[Change | None] | None = None
        if [(entry.name, entry.start, entry.dtype) for entry in entries] == [
            (e.name, e.start, e.dtype) for e in before
        ]:
            found = list(self._pool.map(lambda entry: self._change(entry, old, new), entries))
            if sum(len(change.payload) for change in found if change is not None) > LARGEST_PART * new.nbytes:
                found = None
        if found is None:
            found = list(self._pool.map(lambda entry: self._whole(entry, new), entries))
        changed = {entry.name: change for entry, change in zip(entries, found, strict=True) if change is not None}
        self.saved_bytes += new.nbytes - sum(len(change.payload) for change in changed.values())
        self.folder.mkdir(parents=True, exist_ok=True)
        if not changed:
            return
        file = f"model-{number + 1:05d}.safetensors"
        payloads = {name: change.payload for name, change in changed.items()}
        safetensors.numpy.save_file(payloads, self.folder / file, metadata={"format": "pt"})
        self._rows.update({name: change.row for name, change in changed.items()})
        self._files.update(dict.fromkeys(changed, file))

    def _change(self, entry: Entry, old: Tensor, new: Tensor) -> Change | None:
        before, after = (flat[entry.start : entry.end].view(entry.dtype) for flat in (old, new))
        return delta_files.encode(before, after, self._changes.encoding, self._changes.checksum)

    def _finish(self) -> None:
        """Writes the index, last, and beside all weights the other files of a checkpoint."""
        if self._base is None:
            for path in (*companions(self._changes.origin), self._changes.origin / "config.json"):
                shutil.copyfile(path, self.folder / path.name)
        base_version, base_id = self._base or (None, None)
        encoding = self._changes.encoding if self._base else None
        what = (self._version, self._id, base_version, base_id, encoding, self._changes.checksum)
        text = VersionIndex(*what, self._rows, self._files).text()
        (self.folder / INDEX_NAME).write_text(text, encoding="utf-8")

    def release(self) -> None:
        """Every server has the weights: the next update writes what differs from them."""
        self._sent, self._taken, self._base = self._taken, [], (self._version, self._id)

    def reset(self) -> None:
        """See `DiskTransport.reset`; the hosts may have any version."""
        super().reset()
        self._sent, self._taken, self._base = [], [], None

    def close(self) -> None:
        """See `DiskTransport.close`."""
        self._pool.shutdown()
        super().close()


ANSWER_TIMEOUT_S = 120.0  # after the call, on a network file system


@dataclasses.dataclass(frozen=True)
class PulledLoad:
    """Makes servers load a published version from the checkpoint in `local` on their own host.

    Every rank brings that of its host to the version first, loads it, and answers in the published folder. `sizes` has
    the ranks of each server by its URL.
    """

    local: Path
    sizes: Mapping[str, int]
    timeout_s: float = ANSWER_TIMEOUT_S

    def __call__(self, servers: Sequence[WeightControl], folder: str) -> None:
        """Raises WeightSyncError naming every server that failed."""
        published = Path(folder)
        what = f"loading weights from {folder} through {self.local}"
        call_all(servers, lambda server: self._pull(server, published), what)

    def _pull(self, server: WeightControl, published: Path) -> None:
        name, size = uuid.uuid4().hex[:12], self.sizes[server.url]
        call = {"published": str(published.absolute()), "local": str(self.local), "server": name}
        make = functools.partial(torch.frombuffer, dtype=torch.uint8)
        named = [("call", Rebuilt(make, (bytearray(json.dumps(call).encode()),)))]
        server.pull_weights([base64.b64encode(pickle.dumps(named, protocol=5)).decode("ascii")] * size)
        errors = []
        for rank in range(size):
            try:
                errors.append(read_answer(published, name, rank, self.timeout_s))
            except TimeoutError as error:
                errors.append(f"{error}: the log of the server has the reason")
        if failed := sorted({error for error in errors if error is not None}):
            raise EngineError("; ".join(failed))


def disk_transport(
    servers: list[WeightControl], folder: Path, device: torch.device, changes: ChangedFiles | None
) -> DiskTransport:
    """That of trainer rank 0, for all weights or for `changes`."""
    if changes is None:
        return DiskTransport(servers, folder, device)
    return ChangedFilesTransport(servers, folder, device, changes)


def loader_of(servers: Sequence[WeightControl], sizes: Sequence[int], changes: ChangedFiles | None) -> LoadFolder:
    """How the servers, of `sizes` ranks, load the folder."""
    if changes is None:
        return load_from_disk
    return PulledLoad(changes.local, {server.url: size for server, size in zip(servers, sizes, strict=True)})


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
