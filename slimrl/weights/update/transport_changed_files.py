"""Changes of weights in files (--update-weight-mode delta with --update-weight-transport disk), on trainer rank 0.

The folder of an update has the tensors that changed since the last complete update (`weights.delta_files`). Each engine
host changes its local checkpoint by it, and every rank loads that (`transport_disk.EveryRankLoads`). The first update,
and the attempt after a failed one, are full: so is that of a server that missed a version, because a host without the
base fails the attempt.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import safetensors.numpy
import torch
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.engines.backend import SGLANG
from slimrl.engines.server_protocol import WeightControl
from slimrl.weights import delta_files
from slimrl.weights.delta_files import LARGEST_PART, Change, TensorRow, VersionIndex
from slimrl.weights.hf_checkpoint_writer import INDEX_NAME, companions
from slimrl.weights.local_checkpoint import MOST_THREADS
from slimrl.weights.update.buckets import Bucket, Entry
from slimrl.weights.update.engine_fanout import LoadFolder, load_from_disk
from slimrl.weights.update.topology import EngineEndpoint
from slimrl.weights.update.transport_disk import DiskTransport, EveryRankLoads, EveryRankWaits


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


def file_transport(
    servers: list[WeightControl],
    engines: Sequence[EngineEndpoint],
    folder: Path,
    device: torch.device,
    changes: ChangedFiles | None,
    *,
    every_rank: bool,
) -> tuple[DiskTransport, LoadFolder]:
    """The transport of trainer rank 0, for all weights or for `changes`, and how the `servers` of `engines` load.

    `every_rank`: servers that load all weights have slimrl's loader.
    """
    sizes = [engine.tensor_parallel for engine in engines]
    if changes is not None:
        return ChangedFilesTransport(servers, folder, device, changes), EveryRankLoads.of(servers, sizes, changes.local)
    load: LoadFolder = load_from_disk
    if every_rank:
        load = EveryRankLoads.of(servers, sizes)
    elif all(engine.engine == SGLANG for engine in engines):
        load = EveryRankWaits.of(servers, sizes)
    return DiskTransport(servers, folder, device), load
