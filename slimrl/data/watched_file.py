"""A data file that is open for the length of a run, and noticed when somebody writes over it.

Promises that no byte of another content is taken for the one that was opened: the file's state is asked for after each
reading, which costs a microsecond, and where it is another one, what is read is compared with hashes of 1 MiB each that
were made when the file was first read. Called by the readers of JSON lines and of Parquet.
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
    """What the readers of data files give the bytes to that they read: a hash of hashlib."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Takes the next bytes."""


CHUNK = 1 << 20  # bytes; stays in the processor's cache


class ChangedDataError(OSError):
    """A data file was written over while a run was reading it."""


class WatchedFile:
    """One open file. `size` is that of the opening; a file that takes the place of this one's name is not read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        self._opened = os.fstat(self._file.fileno())
        self._unchanged_at = self._opened
        self.size = self._opened.st_size
        self._chunks: list[int] = []
        self._told_of_replacement = False

    @property
    def own_path(self) -> str:
        """Opens this very file once more, whatever has its name now."""
        return f"/proc/self/fd/{self._file.fileno()}"

    @property
    def hashed(self) -> bool:
        """Whether the whole file went through `add_chunk`."""
        return len(self._chunks) * CHUNK >= self.size

    def add_chunk(self, number: int, chunk: bytes | memoryview) -> None:
        """The content of the file's `number`-th MiB, as it was first read, in order."""
        if number == len(self._chunks):
            self._chunks.append(xxhash.xxh3_64_intdigest(chunk))

    def read(self, begin: int, end: int) -> bytes:
        """These bytes as they are now."""
        return os.pread(self._file.fileno(), end - begin, begin)

    def read_next(self, chunk: bytearray) -> int:
        """Fills `chunk` with the file's next bytes; returns how many there are."""
        return self._file.readinto(chunk)

    def is_untouched(self) -> bool:
        """Whether nobody has written to the file since it was opened, as far as its state says; False asks `compare`.

        Says once, in the log, that another file has its name.
        """
        self._look_for_another()
        return _state(os.fstat(self._file.fileno())) == _state(self._unchanged_at)

    def compare(self, begin: int, end: int, where: str) -> None:
        """Raises ChangedDataError where these bytes, those of the row at `where`, are no longer the file's.

        A file that was written again with the same bytes is the same. Rows that share a MiB with a changed one count as
        changed; of a file whose bytes are not known yet, length and time decide.
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
            f" {self.size} bytes, last changed {_time(self._opened.st_mtime)}, and has {now.st_size} bytes, changed"
            f" {_time(now.st_mtime)}. Put the file back as it was and resume from the newest checkpoint, or begin a new"
            " run with the new file, under a name of its own"
        )

    def _look_for_another(self) -> None:
        try:
            same = os.path.samestat(os.stat(self.path), self._opened)
        except OSError:
            same = False
        if not same and not self._told_of_replacement:
            self._told_of_replacement = True
            logger.warning(
                "data file %s was removed or replaced by another: this run continues with the one that it opened, and"
                " can be resumed only where that is put back",
                self.path,
            )


def _state(found: os.stat_result) -> tuple[int, int, int]:
    """What writing changes; the last cannot be set back."""
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")
