"""Writes a torch_dist checkpoint tensor by tensor, so that no more than a few tensors are ever in memory.

This module plans which process and which file gets which tensor, and writes them; torch.distributed.checkpoint defines
the format and writes the common metadata file. The converter to torch_dist passes in a `Blueprint` (what megatron-core
would store) and a function that reads one weight at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed.checkpoint import SavePlan, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization_config

from slimrl.weights.checkpoint_checksums import BlockHasher, ChecksummingWriter, Checksums, reraise_write_error
from slimrl.weights.hf_checkpoint_writer import WRITE_BYTES, with_own_storage

MAX_FILE_BYTES = 5 * 1024**3
WRITERS = 2  # threads of one process; each writes its own files and holds one weight at a time


@dataclasses.dataclass(frozen=True)
class Piece:
    """One stored block: the part of the tensor `key` (of shape `full`) that starts at `offsets`."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    full: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight of the model, by its Megatron name, and the blocks that `cut` makes of its values, in order.

    `rows` (begin, end) restricts it to some of its rows: a large weight may be split into several of these.
    """

    name: str
    pieces: tuple[Piece, ...]
    cut: Callable[[Tensor], Sequence[Tensor]]
    rows: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return sum(piece.nbytes for piece in self.pieces)

    def in_rows(self, max_bytes: int) -> Iterator[Weight]:
        """The weight split into parts of about `max_bytes` each; it must be stored as one unchanged block."""
        (piece,) = self.pieces
        axis = next((dim for dim, size in enumerate(piece.sizes) if size > 1), 0)  # not one that was prepended
        count = piece.sizes[axis]
        step = max(1, max_bytes * count // max(1, piece.nbytes))
        for begin in range(0, count, step):
            end = min(begin + step, count)
            offsets, sizes = list(piece.offsets), list(piece.sizes)
            offsets[axis], sizes[axis] = offsets[axis] + begin, end - begin
            part = dataclasses.replace(piece, offsets=tuple(offsets), sizes=tuple(sizes))
            yield Weight(self.name, (part,), self.cut, (begin, end))


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """Contents of a checkpoint: the model's weights, and other small objects as bytes by key."""

    weights: tuple[Weight, ...]
    objects: Mapping[str, bytes]

    @property
    def nbytes(self) -> int:
        """The bytes of all weights."""
        return sum(weight.nbytes for weight in self.weights)


def write_torch_dist(
    folder: Path,
    blueprint: Blueprint,
    read: Callable[[Weight], Tensor],
    *,
    rank: int = 0,
    world_size: int = 1,
    max_file_bytes: int = MAX_FILE_BYTES,
    on_written: Callable[[int], object] = lambda nbytes: None,
) -> dict[str, Checksums]:
    """Writes this process' part of `blueprint` into the existing `folder`; process 0 adds the metadata.

    Returns the checksums of all processes' files by name in process 0, and nothing in the others.

    `read` returns the values of one weight (or of its `rows`) in the stored dtype; several threads call it. With
    `world_size` > 1 torch.distributed must be initialised, and every process must pass the same blueprint. Files are
    closed once they exceed `max_file_bytes`. `on_written` is called with the bytes of each finished block, from any
    thread.
    Raises what `read` raises, in the process where it happened, and RuntimeError in the others.
    """
    planner = _Planner(blueprint, read, rank=rank, world_size=world_size)
    writer = _StreamWriter(folder, planner, max_file_bytes, on_written)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            torch_checkpoint.save({}, storage_writer=writer, planner=planner, no_dist=world_size == 1)
        except CheckpointException as problem:
            raise _first_cause(problem, rank) from problem
    return writer.checksums


def _first_cause(problem: CheckpointException, rank: int) -> BaseException:
    """This process' own error if it has one, else an error that names the failed process."""
    failed, (cause, _) = min(problem.failures.items(), key=lambda failure: failure[0] != rank)
    return cause if failed == rank else RuntimeError(f"process {failed} failed: {cause}")


class _Planner(SavePlanner):
    """The plan of one process: whole weights, largest first, each assigned to the process with the fewest bytes."""

    def __init__(
        self, blueprint: Blueprint, read: Callable[[Weight], Tensor], *, rank: int = 0, world_size: int = 1
    ) -> None:
        self.weights = _share(blueprint.weights, rank, world_size)
        self._objects = blueprint.objects if rank == 0 else {}
        self._read = read

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Ignores the state dict: the blueprint is complete."""

    def create_local_plan(self) -> SavePlan:
        objects = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._objects]
        return SavePlan(objects + [_item(piece) for weight in self.weights for piece in weight.pieces])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> io.BytesIO:
        return io.BytesIO(self._objects[write_item.index.fqn])

    def blocks(self, weight: Weight) -> Iterator[tuple[WriteItem, Tensor]]:
        """Reads one weight and yields its blocks, each in a separate storage."""
        blocks = weight.cut(self._read(weight))
        for piece, block in zip(weight.pieces, blocks, strict=True):
            if block.dtype != piece.dtype or block.numel() != torch.Size(piece.sizes).numel():
                raise ValueError(
                    f"{piece.key} has shape {list(block.shape)} of {block.dtype} and not {list(piece.sizes)} of"
                    f" {piece.dtype}: the model was not built from the same flags"
                )
            yield _item(piece), with_own_storage(block.detach().reshape(piece.sizes))


def _share(weights: Sequence[Weight], rank: int, world_size: int) -> list[Weight]:
    """The weights of one process, in the order of the blueprint."""
    loads = [0] * world_size
    mine = []
    for number, weight in sorted(enumerate(weights), key=lambda entry: entry[1].nbytes, reverse=True):
        owner = loads.index(min(loads))
        loads[owner] += weight.nbytes
        if owner == rank:
            mine.append(number)
    return [weights[number] for number in sorted(mine)]


def _item(piece: Piece) -> WriteItem:
    offsets = torch.Size(piece.offsets)
    return WriteItem(
        MetadataIndex(piece.key, offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offsets, torch.Size(piece.sizes)),
            TensorProperties(dtype=piece.dtype),
            torch.Size(piece.full),
        ),
    )


class _StreamWriter(ChecksummingWriter):
    """torch's file writer, except that tensors are not kept in memory until their file is closed."""

    def __init__(
        self, folder: Path, planner: _Planner, max_file_bytes: int, on_written: Callable[[int], object]
    ) -> None:
        super().__init__(folder, sync_files=False)
        self._planner = planner
        self._max_file_bytes = max_file_bytes
        self._on_written = on_written
        self._stopped = threading.Event()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the plan's objects and weights; returns the location of each."""
        names = _FileNames(Path(self.path), plan.storage_data.prefix)
        results = self._write_objects([item for item in plan.items if item.type is WriteItemType.BYTE_IO], names)
        queue = _Queue(self._planner.weights)
        with ThreadPoolExecutor(WRITERS) as pool:
            threads = [pool.submit(self._write_files, queue, names) for _ in range(WRITERS)]
            try:
                wait(threads, return_when=FIRST_EXCEPTION)
            finally:
                self._stopped.set()
        for thread in threads:
            results += thread.result()
        return self.with_checksums(results, names.checksums)

    def _write_objects(self, items: list[WriteItem], names: _FileNames) -> list[WriteResult]:
        if not items:
            return []
        results = []
        with names.new_file() as (path, stream):
            for item in items:
                begin = stream.tell()
                stream.write(self._planner.resolve_data(item).getbuffer())
                results.append(_result(item, path, begin, stream.tell()))
        return results

    def _write_files(self, queue: _Queue, names: _FileNames) -> list[WriteResult]:
        """One thread: writes weights from the queue into one file after another until the queue is empty."""
        # torch.load ignores the archive's checksums, and computing them takes as long as the copying
        with serialization_config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            return self._write_until_empty(queue, names)

    def _write_until_empty(self, queue: _Queue, names: _FileNames) -> list[WriteResult]:
        results: list[WriteResult] = []
        while (weight := queue.next()) is not None:
            with names.new_file() as (path, stream):
                while weight is not None and not self._stopped.is_set():
                    for item, block in self._planner.blocks(weight):
                        begin = stream.tell()
                        torch.save(block, cast("IO[bytes]", stream))
                        results.append(_result(item, path, begin, stream.tell()))
                        self._on_written(block.nbytes)
                    del block  # frees it before the next one is read
                    weight = queue.next() if stream.tell() < self._max_file_bytes else None
            if self._stopped.is_set():
                break
        return results


class _Queue:
    """Queue of weights for the threads."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self._weights = iter(weights)
        self._lock = threading.Lock()

    def next(self) -> Weight | None:
        """The next weight, or None if all are taken."""
        with self._lock:
            return next(self._weights, None)


class _FileNames:
    """Makes the files `<prefix><n>.distcp` for threads, each once; `checksums` has those of the finished ones."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder, self._prefix = Path(folder), prefix
        self.checksums: dict[str, Checksums] = {}
        self._count = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def new_file(self) -> Iterator[tuple[Path, _NewFile]]:
        """A new path, and the file opened there for writing."""
        with self._lock:
            self._count += 1
            path = self._folder / f"{self._prefix}{self._count - 1}.distcp"
        with _NewFile(path) as stream, reraise_write_error(stream.failures):
            yield path, stream
        self.checksums[path.name] = stream.hasher.finish()


class _NewFile:
    """A file to write sequentially, in small calls (see WRITE_BYTES)."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._position = 0
        self.hasher = BlockHasher()
        self.failures: list[OSError] = []
        self._path = path

    def __enter__(self) -> _NewFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._descriptor)

    def write(self, data: bytes | memoryview) -> int:
        """Appends `data`; torch.save calls it."""
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view):
                count = os.write(self._descriptor, view[done : done + WRITE_BYTES])
                self.hasher.update(view[done : done + count])
                done += count
        except OSError as error:
            self.failures.append(OSError(error.errno, error.strerror, str(self._path)))
            raise self.failures[-1] from error
        self._position += done
        return done

    def flush(self) -> None:
        """Does nothing: no data is buffered."""

    def tell(self) -> int:
        """The bytes written so far."""
        return self._position


def _result(item: WriteItem, path: Path, begin: int, end: int) -> WriteResult:
    return WriteResult(item.index, end - begin, _StorageInfo(path.name, begin, end - begin))
