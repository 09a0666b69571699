"""Checksums of checkpoint files, one per block of 1 MiB: made while files are written, compared while they are read.

A changed byte is reported with file and place before its value is used. Only the blocks that are wanted are read, and
no file is read a second time. The checksums are in `checksums.json`.

`ChecksummingWriter` writes the same files as torch's own writer, and has the checksums of all processes' files at the
coordinator after `finish`; checkpoint saving and the converter use it. `CheckedFiles` reads, below megatron-core's
reader.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from slimrl.weights.safetensors_writer import WRITE_BYTES

CHECKSUMS_NAME = "checksums.json"
BLOCK = 1 << 20  # bytes
_ALGORITHM = "xxh3_64"
_DIGITS = 16  # of one checksum in hex


class DamagedFileError(ValueError):
    """A file has not the bytes that were written."""


@dataclasses.dataclass(frozen=True)
class Checksums:
    """One file: how long it is, and the checksums of its blocks in hex, end to end."""

    bytes: int
    blocks: str


class BlockHasher:
    """Takes a file's bytes as they are written."""

    def __init__(self) -> None:
        self._count = 0
        self._hash = xxhash.xxh3_64()  # of the block that is not full yet
        self._blocks: list[str] = []

    def update(self, data: bytes | memoryview) -> None:
        """The next bytes."""
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
        """Of all bytes so far."""
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
        """None where the checkpoint has no checksums. Raises DamagedFileError for a damaged `checksums.json`."""
        path = Path(folder) / CHECKSUMS_NAME
        try:
            content = json.loads(path.read_bytes())
            if content["algorithm"] != _ALGORITHM or content["block_bytes"] != BLOCK:
                raise DamagedFileError(
                    f"{path} has checksums by {content['algorithm']} of {content['block_bytes']} bytes each, and this"
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
        """Fills `view` with the bytes of the open file from `begin` on; returns how many there were.

        Raises DamagedFileError where they are not those that were written.
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
        """Reads these files (None: all) to the end; returns how many bytes.

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
_BESIDE = 1 << 18  # bytes from which on handing over to another thread is worth it


class ChecksummingWriter(FileSystemWriter):
    """After `finish`, `checksums` has those of every process' files by name, at the coordinator only."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.checksums: dict[str, Checksums] = {}
        self._own: dict[str, Checksums] = {}
        self._files = self.fs = _HashingFiles(self._own)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this process' files; its checksums travel with the places of its tensors.

        Raises OSError, with the path, where there is no room.
        """
        with behind_torch(self._files.failures):
            return self.with_checksums(super().write_data(plan, planner).value(), self._own)

    def with_checksums(self, results: list[WriteResult], own: dict[str, Checksums]) -> Future[list[WriteResult]]:
        """`results` with the checksums of this process' files beside them."""
        done: Future[list[WriteResult]] = Future()
        done.set_result([*results, WriteResult(MetadataIndex(_CARRIER), 0, dict(own))])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes `.metadata`, which knows nothing of checksums."""
        for result in (result for of_one in results for result in of_one if result.index.fqn == _CARRIER):
            self.checksums |= result.storage_data
        super().finish(metadata, [[r for r in of_one if r.index.fqn != _CARRIER] for of_one in results])


@contextmanager
def behind_torch(failures: list[OSError]) -> Iterator[None]:
    """Raises the first of `failures` where torch.save met it and speaks of something else ("unexpected pos")."""
    try:
        yield
    except RuntimeError as error:
        if failures:
            raise failures[0] from error
        raise


@contextmanager
def _named(path: str | os.PathLike[str], failures: list[OSError]) -> Iterator[None]:
    """An error of writing has the path, which the kernel does not say, and is noted in `failures`."""
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
            with ThreadPoolExecutor(1, thread_name_prefix="checksums") as pool:
                hashed = _HashedStream(stream, path, self.failures, pool)
                yield hashed
        self._checksums[Path(path).name] = hashed.hasher.finish()


class _HashedStream:
    """What torch uses of a file to write. Large pieces are hashed by another thread while the kernel takes them."""

    def __init__(
        self, stream: Any, path: str | os.PathLike[str], failures: list[OSError], pool: ThreadPoolExecutor
    ) -> None:
        self.hasher = BlockHasher()
        self._stream, self._path, self._failures, self._pool = stream, path, failures, pool
        self.tell, self.flush, self.fileno, self.close = stream.tell, stream.flush, stream.fileno, stream.close

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        hashing = self._pool.submit(self.hasher.update, view) if len(view) >= _BESIDE else None
        if hashing is None:
            self.hasher.update(view)
        try:
            with _named(self._path, self._failures):
                for begin in range(0, len(view), WRITE_BYTES):
                    self._stream.write(view[begin : begin + WRITE_BYTES])
            return len(view)
        finally:
            if hashing is not None:
                hashing.result()  # the memory is the caller's again


class CheckedFiles(FileSystem):
    """Opens files whose bytes are compared with their checksums as they are read."""

    def __init__(self, checked: CheckedFolder) -> None:
        super().__init__()
        self._checked = checked

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            yield _CheckedStream(stream, Path(path).name, self._checked) if mode == "rb" else stream


class _CheckedStream(io.RawIOBase):
    """A file to read from any place."""

    def __init__(self, stream: Any, name: str, checked: CheckedFolder) -> None:
        self._stream, self._name, self._checked = stream, name, checked
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: os.fstat(self._stream.fileno()).st_size}
        self._place = start[whence] + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = self._checked.read_into(self._stream.fileno(), self._name, self._place, view)
        self._place += count
        return count
