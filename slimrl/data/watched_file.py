"""A data file that stays open for a whole run and detects when it is overwritten.

Changed bytes are never returned as the original ones: the file's stat is checked after each read, which takes a
microsecond. If it changed, the bytes are compared with hashes of 1 MiB chunks from the first read. Used by the readers
of JSON lines and Parquet.
"""

from __future__ import annotations

import datetime
import logging
import os
from pathlib import Path
from typing import Protocol

import xxhash

logger = logging.getLogger(__name__)


class Digest(Protocol):
    """A hash object of hashlib, which the readers update with the bytes that they read."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Adds the next bytes."""


CHUNK = 1 << 20  # bytes; fits into the CPU cache


class ChangedDataError(OSError):
    """A data file was overwritten while a run was using it."""


class WatchedFile:
    """One open file with its `size` at opening; a file that replaces it under the same name is not read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        self._opened = os.fstat(self._file.fileno())
        self._unchanged_at = self._opened
        self.size = self._opened.st_size
        self._chunks: list[int] = []
        self._warned_of_replacement = False

    @property
    def own_path(self) -> str:
        """A path that reopens this same file, even if another file has its name now."""
        return f"/proc/self/fd/{self._file.fileno()}"

    @property
    def hashed(self) -> bool:
        """Whether all chunks have been added with `add_chunk`."""
        return len(self._chunks) * CHUNK >= self.size

    def add_chunk(self, number: int, chunk: bytes | memoryview) -> None:
        """Records the hash of the file's `number`-th MiB at the first read; call in order."""
        if number == len(self._chunks):
            self._chunks.append(xxhash.xxh3_64_intdigest(chunk))

    def read(self, begin: int, end: int) -> bytes:
        """The current bytes of this range."""
        return os.pread(self._file.fileno(), end - begin, begin)

    def read_next(self, chunk: bytearray) -> int:
        """Fills `chunk` with the file's next bytes; returns how many there are."""
        return self._file.readinto(chunk)

    def is_untouched(self) -> bool:
        """Whether the file's stat shows no write since it was opened; if not, call `compare`.

        Logs a warning once if another file has its name.
        """
        self._check_replacement()
        return _state(os.fstat(self._file.fileno())) == _state(self._unchanged_at)

    def compare(self, begin: int, end: int, where: str) -> None:
        """Raises ChangedDataError if these bytes, of the row at `where`, changed since the first read.

        A file rewritten with the same bytes counts as unchanged. Rows that share a MiB with a changed row count as
        changed. Before all chunks are hashed, the file's size and time decide.
        """
        now = os.fstat(self._file.fileno())
        if self.hashed:
            same = all(
                xxhash.xxh3_64_intdigest(self.read(number * CHUNK, min((number + 1) * CHUNK, self.size)))
                == self._chunks[number]
                for number in range(begin // CHUNK, -(-end // CHUNK))
            )
        else:
            same = _state(now)[:2] == _state(self._opened)[:2]
        if not same:
            raise self._changed(where)
        if self.hashed and begin == 0 and end == self.size:
            self._unchanged_at = now

    def _changed(self, where: str) -> ChangedDataError:
        now = os.fstat(self._file.fileno())
        return ChangedDataError(
            f"data file {self.path} was changed while this run was using it, found at {where}: it had"
            f" {self.size} bytes, last changed {_time(self._opened.st_mtime)}, and now has {now.st_size} bytes, changed"
            f" {_time(now.st_mtime)}. Restore the file and resume from the latest checkpoint, or start a new run with"
            " the new file under another name"
        )

    def _check_replacement(self) -> None:
        try:
            same = os.path.samestat(os.stat(self.path), self._opened)
        except OSError:
            same = False
        if not same and not self._warned_of_replacement:
            self._warned_of_replacement = True
            logger.warning(
                "data file %s was removed or replaced: this run continues with the file that it opened, but can be"
                " resumed only after that file is restored",
                self.path,
            )


def _state(found: os.stat_result) -> tuple[int, int, int]:
    """The stat fields that a write changes; ctime cannot be reset."""
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")
