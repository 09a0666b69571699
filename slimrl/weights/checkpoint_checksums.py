"""Checksums of checkpoint files, one per block of 1 MiB, computed on write and verified on read.

A changed byte is reported with file and offset before its value is used. Only the requested blocks are read, and no
file is read twice. The checksums are in `checksums.json`.

`ChecksummingWriter` writes the same files as torch's own writer, and has the checksums of all processes' files at the
coordinator after `finish`; checkpoint saving and the converter use it. `slimrl.weights.direct_reader` and the
converters read through `CheckedFolder`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from slimrl.weights.hf_checkpoint_writer import WRITE_BYTES

CHECKSUMS_NAME = "checksums.json"
BLOCK = 1 << 20  # bytes
_ALGORITHM = "xxh3_64"
_DIGITS = 16  # of one checksum in hex


class DamagedFileError(ValueError):
    """A file does not have the bytes that were written."""


@dataclasses.dataclass(frozen=True)
class Checksums:
    """One file: its length, and the concatenated checksums of its blocks in hex."""

    bytes: int
    blocks: str


class BlockHasher:
    """Computes the checksums of a file while it is written."""

    def __init__(self) -> None:
        self._count = 0
        self._hash = xxhash.xxh3_64()  # of the block that is not full yet
        self._blocks: list[str] = []

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes."""
        view = memoryview(data).cast("B")
        place = 0
        while place < len(view):
            room = BLOCK - self._count % BLOCK
            part = view[place : place + room]
            self._hash.update(part)
            self._count += len(part)
            place += len(part)
            if self._count % BLOCK == 0:
                self._blocks.append(self._hash.hexdigest())
                self._hash.reset()

    def finish(self) -> Checksums:
        """The checksums of all bytes so far."""
        last = [self._hash.hexdigest()] if self._count % BLOCK else []
        return Checksums(self._count, "".join(self._blocks + last))


class CheckedFolder:
    """The files of one checkpoint as `checksums.json` describes them; threads may share one."""

    def __init__(self, folder: Path, files: Mapping[str, Checksums]) -> None:
        self._folder = folder
        self._files = files
        self._verified = {name: bytearray(len(known.blocks) // _DIGITS) for name, known in files.items()}

    @classmethod
    def open(cls, folder: str | Path) -> CheckedFolder | None:
        """None if the checkpoint has no checksums. Raises DamagedFileError for a damaged `checksums.json`."""
        path = Path(folder) / CHECKSUMS_NAME
        try:
            content = json.loads(path.read_bytes())
            if content["algorithm"] != _ALGORITHM or content["block_bytes"] != BLOCK:
                raise DamagedFileError(
                    f"{path} has {content['algorithm']} checksums of {content['block_bytes']}-byte blocks, and this"
                    f" slimrl reads {_ALGORITHM} of {BLOCK}: use the slimrl that wrote it, or remove that file to load"
                    " the checkpoint without verifying it"
                )
            if content["seal"] != _seal(content["files"]):
                raise ValueError("its own checksum differs")
            files = {name: Checksums(**entry) for name, entry in content["files"].items()}
        except FileNotFoundError:
            return None
        except DamagedFileError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedFileError(f"{path} is damaged ({error}): copy the checkpoint again") from error
        return cls(Path(folder), files)

    @property
    def names(self) -> list[str]:
        """The files that have checksums."""
        return sorted(self._files)

    def read_into(self, descriptor: int, name: str, begin: int, view: memoryview) -> int:
        """Fills `view` with the bytes of the open file from `begin` on; returns their number.

        Raises DamagedFileError if they differ from those that were written.
        """
        known = self._files.get(name)
        if known is None:
            return read_at(descriptor, begin, view)
        end = min(begin + len(view), known.bytes)
        place = begin
        while place < end:
            number = place // BLOCK
            low, high = number * BLOCK, min((number + 1) * BLOCK, known.bytes)
            stop = min(high, end)
            part = view[place - begin : stop - begin]
            if self._verified[name][number]:
                self._read_all(descriptor, name, place, part)
            elif (place, stop) == (low, high):
                self._read_all(descriptor, name, low, part)
                self._compare(name, number, part)
            else:
                block = memoryview(bytearray(high - low))
                self._read_all(descriptor, name, low, block)
                self._compare(name, number, block)
                part[:] = block[place - low : stop - low]
            place = stop
        return max(0, end - begin)

    def check(self, names: Iterable[str] | None = None) -> int:
        """Verifies these files (None: all); returns the number of bytes read.

        Raises DamagedFileError naming the first that is missing, of another length, or has other bytes.
        """
        total = 0
        block = memoryview(bytearray(BLOCK))
        for name in self.names if names is None else names:
            known = self._files.get(name)
            if known is None:
                continue
            path = self._folder / name
            if not path.is_file():
                raise DamagedFileError(f"{path} is missing: copy the checkpoint again, or take an older one")
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if os.fstat(descriptor).st_size != known.bytes:
                    raise _damaged(path, f"it has {os.fstat(descriptor).st_size} bytes, and {known.bytes} were written")
                for begin in range(0, known.bytes, BLOCK):
                    self.read_into(descriptor, name, begin, block[: min(BLOCK, known.bytes - begin)])
            finally:
                os.close(descriptor)
            total += known.bytes
        return total

    def _read_all(self, descriptor: int, name: str, begin: int, view: memoryview) -> None:
        if (count := read_at(descriptor, begin, view)) < len(view):
            raise _damaged(self._folder / name, f"it ends at byte {begin + count}")

    def _compare(self, name: str, number: int, block: memoryview) -> None:
        if xxhash.xxh3_64_hexdigest(block) != self._files[name].blocks[number * _DIGITS : (number + 1) * _DIGITS]:
            low = number * BLOCK
            raise _damaged(
                self._folder / name, f"bytes {low} to {low + len(block) - 1} are not those that were written"
            )
        self._verified[name][number] = 1


def read_at(descriptor: int, begin: int, view: memoryview) -> int:
    """Fills `view` from byte `begin` of a file on; returns the bytes read, fewer only at its end."""
    done = 0
    while done < len(view):  # one call reads 2 GiB at most
        count = os.preadv(descriptor, [view[done:]], begin + done)
        if count == 0:
            break
        done += count
    return done


def checksums_text(folder: Path, known: Mapping[str, Checksums]) -> str:
    """The content of `checksums.json` for the files in `folder`; those that `known` lacks are read now."""
    files = {
        path.name: dataclasses.asdict(known.get(path.name) or _checksums_of(path))
        for path in sorted(folder.iterdir())
        if path.name != CHECKSUMS_NAME
    }
    content = {"algorithm": _ALGORITHM, "block_bytes": BLOCK, "files": files, "seal": _seal(files)}
    return json.dumps(content, indent=1) + "\n"


def _checksums_of(path: Path) -> Checksums:
    hasher = BlockHasher()
    with path.open("rb") as file:
        while chunk := file.read(BLOCK):
            hasher.update(chunk)
    return hasher.finish()


def _seal(files: Mapping[str, Mapping[str, object]]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(files, sort_keys=True).encode())


def _damaged(path: Path, what: str) -> DamagedFileError:
    return DamagedFileError(f"{path} is damaged, {what}: copy the checkpoint again, or take an older one (--ckpt-step)")


_CARRIER = "slimrl checksums"
_WRITE_BACK = 1 << 24  # bytes after which the disk starts to write them


class ChecksummingWriter(FileSystemWriter):
    """After `finish`, `checksums` has those of every process' files by name, at the coordinator only."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.checksums: dict[str, Checksums] = {}
        self._own: dict[str, Checksums] = {}
        self._files = self.fs = _HashingFiles(self._own)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this process' files; returns its checksums together with the locations of its tensors.

        Raises OSError, with the path, if the disk is full.
        """
        with reraise_write_error(self._files.failures):
            return self.with_checksums(super().write_data(plan, planner).value(), self._own)

    def with_checksums(self, results: list[WriteResult], own: dict[str, Checksums]) -> Future[list[WriteResult]]:
        """`results` with the checksums of this process' files."""
        done: Future[list[WriteResult]] = Future()
        done.set_result([*results, WriteResult(MetadataIndex(_CARRIER), 0, dict(own))])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes `.metadata`, which has no checksums."""
        for result in (result for of_one in results for result in of_one if result.index.fqn == _CARRIER):
            self.checksums |= result.storage_data
        super().finish(metadata, [[r for r in of_one if r.index.fqn != _CARRIER] for of_one in results])


@contextmanager
def reraise_write_error(failures: list[OSError]) -> Iterator[None]:
    """Raises the first of `failures` if torch.save hides it behind another error ("unexpected pos")."""
    try:
        yield
    except RuntimeError as error:
        if failures:
            raise failures[0] from error
        raise


@contextmanager
def _named(path: str | os.PathLike[str], failures: list[OSError]) -> Iterator[None]:
    """Adds the path, which the kernel does not report, to a write error and appends it to `failures`."""
    try:
        yield
    except OSError as error:
        named = error if error.filename else OSError(error.errno, error.strerror, str(path))
        failures.append(named)
        raise named from error.__cause__


class _HashingFiles(FileSystem):
    """Opens files whose bytes are hashed as they are written; `failures` are the errors of writing, with the path."""

    def __init__(self, checksums: dict[str, Checksums]) -> None:
        super().__init__()
        self._checksums = checksums
        self.failures: list[OSError] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with _named(path, self.failures), super().create_stream(path, mode) as stream:
            if mode != "wb" or not str(path).endswith(".distcp"):
                yield stream
                return
            hashed = _HashedStream(stream, path, self.failures)
            yield hashed
        self._checksums[Path(path).name] = hashed.hasher.finish()


class _HashedStream:
    """The file interface that torch writes to; hashes each part just before the kernel copies it from the cache."""

    def __init__(self, stream: Any, path: str | os.PathLike[str], failures: list[OSError]) -> None:
        self.hasher = BlockHasher()
        self._stream, self._path, self._failures = stream, path, failures
        self._written = self._started = 0
        self.tell, self.flush, self.fileno, self.close = stream.tell, stream.flush, stream.fileno, stream.close

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        with _named(self._path, self._failures):
            for low in range(0, len(view), BLOCK):
                part = view[low : low + BLOCK]
                self.hasher.update(part)
                for begin in range(0, len(part), WRITE_BYTES):
                    self._stream.write(part[begin : begin + WRITE_BYTES])
                self._written += len(part)
                if self._written - self._started >= _WRITE_BACK:
                    self._start_write_back()
        return len(view)

    def _start_write_back(self) -> None:
        """Lets the disk begin at once, and not when the whole file waits for it."""
        # for pages that are not on the disk yet this starts writing them and keeps them in the cache
        os.posix_fadvise(self._stream.fileno(), self._started, self._written - self._started, os.POSIX_FADV_DONTNEED)
        self._started = self._written
