"""torch's writer and reader of checkpoint files, with checksums made on the way out and compared on the way in.

Promises the same files as torch's own, and that the checksums of all processes' files are at the coordinator once it
has finished. Called by the saver of training and the converter; the reader is put under megatron-core's.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from slimrl.weights.file_checksums import BlockHasher, CheckedFolder, Checksums
from slimrl.weights.hf_shards import WRITE_BYTES

_CARRIER = "slimrl checksums"
_BESIDE = 1 << 18  # bytes from which on handing over to another thread is worth it


class ChecksummingWriter(FileSystemWriter):
    """After `finish`, `checksums` has those of every process' files by name, at the coordinator only."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.checksums: dict[str, Checksums] = {}
        self._own: dict[str, Checksums] = {}
        self.fs = _HashingFiles(self._own)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this process' files; its checksums travel with the places of its tensors.

        Raises OSError, with the path, where there is no room.
        """
        with behind_torch(self.fs.failures):
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
