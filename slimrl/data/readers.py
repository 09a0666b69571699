"""Random access to dataset rows by number: JSON lines and Parquet files, folders of them, slices.

Rows are read on demand. A bad row is returned as an `InvalidRow`, never skipped, and every row has a location
(`file:line`). For JSON lines, the start of each line is found once and takes eight bytes per row. Parquet is in a
separate module, so that pyarrow is loaded only if needed.

A file stays open for the whole run and detects when it is overwritten (`WatchedFile`). Changed bytes are never returned
as the original ones: the file's stat is checked after each read, which takes a microsecond; if it changed, the bytes
are compared with hashes of 1 MiB chunks from the first read.
"""

from __future__ import annotations

import bisect
import dataclasses
import datetime
import itertools
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import orjson
import xxhash

from slimrl.data.prompt_format import DataPath, InvalidRow, Row, files_of

if TYPE_CHECKING:
    from slimrl.data.parquet import ParquetFile

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


_CHUNK = CHUNK
_BLOCK = 4 << 20  # bytes that are parsed at a time
_LONG_INTEGER = re.compile(rb"\d{19}")
_NEWLINE = ord("\n")
_BLANK = np.isin(np.arange(256), np.frombuffer(b" \t\r\n\x0b\x0c", dtype=np.uint8))


class JsonlFile:
    """The rows of one `.jsonl` file without blank lines. Keeps the file open, so that replacing it has no effect."""

    columns: frozenset[str] | None = None  # columns may differ from row to row

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = WatchedFile(path)
        starts, suspects = self._scan()
        blank = np.array([line for line in suspects.tolist() if not self._line(starts, line).strip()], dtype=np.int64)
        self._starts = np.delete(starts, blank) if len(blank) else starts
        # number of rows before each blank line, to convert row numbers to line numbers
        self._rows_before_blank = blank - np.arange(len(blank))

    def __len__(self) -> int:
        return len(self._starts)

    def where(self, row: int) -> str:
        """`file:line`, lines counted from 1."""
        return f"{self._path}:{self._number_of_line(row)}"

    def read(self, rows: Sequence[int]) -> list[Row]:
        """These rows, in this order, bad ones as InvalidRow. Raises ChangedDataError if one of them was changed."""
        result = [_parse(self._line(self._starts, row), exact=True) for row in rows]
        if not self._file.is_untouched():
            for row in rows:
                self._file.compare(int(self._starts[row]), self._end(self._starts, row), self.where(row))
        return result

    def blocks(self, start: int, end: int, digest: Digest) -> Iterator[list[Row]]:
        """Rows start to end-1 in order, some megabytes at a time; updates `digest` with their bytes.

        Integers of more than 64 bits become floats. Raises ChangedDataError if the file was changed.
        """
        first = start
        while first < end:
            offset = int(self._starts[first])
            last = min(max(int(np.searchsorted(self._starts, offset + _BLOCK)), first + 1), end)
            bounds = [*self._starts[first:last].tolist(), self._end(self._starts, last - 1)]
            block = memoryview(self._file.read(offset, bounds[-1]))
            if not self._file.is_untouched():
                self._file.compare(offset, bounds[-1], f"{self.where(first)} to {self._number_of_line(last - 1)}")
            digest.update(block)
            yield [_parse(block[a - offset : b - offset]) for a, b in itertools.pairwise(bounds)]
            first = last

    def _number_of_line(self, row: int) -> int:
        return row + 1 + int(np.searchsorted(self._rows_before_blank, row, side="right"))

    def _line(self, starts: np.ndarray, line: int) -> bytes:
        return self._file.read(int(starts[line]), self._end(starts, line))

    def _end(self, starts: np.ndarray, line: int) -> int:
        """The offset of the next row: blank lines in between are whitespace to a JSON parser."""
        return int(starts[line + 1]) if line + 1 < len(starts) else self._file.size

    def _scan(self) -> tuple[np.ndarray, np.ndarray]:
        """The offset of each line, and the numbers of the lines that start with whitespace."""
        chunk = bytearray(_CHUNK)
        view = np.frombuffer(chunk, dtype=np.uint8)
        starts, suspects = [], []
        offset, lines, fresh = 0, 0, True
        for number in itertools.count():
            count = self._file.read_next(chunk)
            if not count:
                break
            self._file.add_chunk(number, memoryview(chunk)[:count])
            after = np.flatnonzero(view[:count] == _NEWLINE) + 1
            ended = len(after) > 0 and after[-1] == count
            begins = np.concatenate(([0], after)) if fresh else after
            begins = begins[:-1] if ended else begins
            suspects.append(np.flatnonzero(_BLANK[view[begins]]) + lines)
            starts.append(begins + offset)
            lines += len(begins)
            # a chunk that does not end with a newline leaves a line unfinished
            fresh = ended
            offset += count
        if not starts:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        return np.concatenate(starts).astype(np.int64, copy=False), np.concatenate(suspects)


def _parse(line: bytes | memoryview, *, exact: bool = False) -> Row:
    try:
        row: Any = orjson.loads(line)
        if exact and _LONG_INTEGER.search(line):
            # orjson turns integers of more than 64 bits into floats; it still validates the line, because the standard
            # library alone would accept NaN
            row = json.loads(bytes(line))
    except ValueError as error:
        return InvalidRow(f"not valid JSON: {error}")
    if not isinstance(row, dict):
        return InvalidRow(f"a row must be a JSON object, this one is {type(row).__name__}")
    return row


@dataclasses.dataclass(frozen=True)
class _Window:
    """The rows `first` to `end - 1` of a file."""

    file: JsonlFile | ParquetFile
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


class RowSet:
    """The rows of several data paths, numbered from 0 in the order of paths, files and lines."""

    def __init__(self, source: str, windows: Sequence[_Window]) -> None:
        self.source = source
        self._windows = windows
        self._ends = list(itertools.accumulate(len(window) for window in windows))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def columns(self) -> frozenset[str] | None:
        """The columns that all Parquet files have; None without Parquet files."""
        known = [window.file.columns for window in self._windows if window.file.columns is not None]
        return frozenset.intersection(*known) if known else None

    def where(self, row: int) -> str:
        """The location of a row, for messages: `file:line`."""
        window, number = self._find(row)
        return self._windows[window].file.where(number)

    def read(self, rows: Sequence[int]) -> list[Row]:
        """These rows, in this order. Raises ChangedDataError if one of them was changed."""
        by_window: dict[int, list[tuple[int, int]]] = {}
        for position, row in enumerate(rows):
            window, number = self._find(row)
            by_window.setdefault(window, []).append((position, number))
        result: list[Row] = [{}] * len(rows)
        for window, requested in by_window.items():
            found = self._windows[window].file.read([number for _, number in requested])
            for (position, _), content in zip(requested, found, strict=True):
                result[position] = content
        return result

    def blocks(self, digest: Digest) -> Iterator[list[Row]]:
        """All rows in order, a block at a time; updates `digest` with their content, independent of the files' paths.

        May run in another thread than `read`.
        """
        for window in self._windows:
            yield from window.file.blocks(window.first, window.end, digest)

    def _find(self, row: int) -> tuple[int, int]:
        """The window of a row, and its number in that window's file."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {self.source}, which has {len(self)}")
        window = bisect.bisect_right(self._ends, row)
        return window, self._windows[window].end - (self._ends[window] - row)


def open_rows(data_paths: str | Sequence[str], columns: Sequence[str] | None = None) -> RowSet:
    """Opens `.jsonl` and `.parquet` files and folders of them, whole or as `path@[start:end]`, in order.

    `columns` are those that will be read (None: all); rows may contain more. Blank lines are not rows.
    Raises FileNotFoundError, and ValueError for an unknown kind of file and for a path without rows.
    """
    paths = [data_paths] if isinstance(data_paths, str) else data_paths
    return RowSet(" ".join(paths), [window for path in paths for window in _windows(path, columns)])


def _windows(data_path: str, columns: Sequence[str] | None) -> list[_Window]:
    parsed = DataPath.parse(data_path)
    files = [_open(file, columns) for file in files_of(parsed.path)]
    start, end, _ = parsed.rows.indices(sum(len(file) for file in files))
    windows, before = [], 0
    for file in files:
        first, last = max(start - before, 0), min(end - before, len(file))
        if first < last:
            windows.append(_Window(file, first, last))
        before += len(file)
    if not windows:
        raise ValueError(f"data file {data_path} has no rows: give a file (and slice) with at least one row")
    return windows


def _open(path: Path, columns: Sequence[str] | None) -> JsonlFile | ParquetFile:
    if path.suffix == ".jsonl":
        return JsonlFile(path)
    # imported here: pyarrow takes 50 MB, and most data is JSON lines
    from slimrl.data.parquet import ParquetFile

    return ParquetFile(path, columns)
