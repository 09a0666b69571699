"""A data set as rows by number: JSON lines and Parquet files, folders of them, slices; opened by index, never loaded.

Promises that a row is read when it is asked for, that a bad one comes as a `BadRow` and never goes missing, and that
every row has an address (`file:line`). Called where prompts are made of rows.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from slimrl.data.bad_row import Row
from slimrl.data.data_path import DataPath, files_of
from slimrl.data.jsonl import JsonlFile

if TYPE_CHECKING:
    from pathlib import Path

    from slimrl.data.parquet import ParquetFile


@dataclasses.dataclass(frozen=True)
class _Window:
    """The rows `first` to `end - 1` of a file."""

    file: JsonlFile | ParquetFile
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


class RowSet:
    """The rows that some data paths name, numbered from 0 in the order of the paths, their files and the lines."""

    def __init__(self, source: str, windows: Sequence[_Window]) -> None:
        self.source = source
        self._windows = windows
        self._ends = list(itertools.accumulate(len(window) for window in windows))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def columns(self) -> frozenset[str] | None:
        """The columns that every Parquet row has; None where there is none: a row of JSON lines has its own."""
        known = [window.file.columns for window in self._windows if window.file.columns is not None]
        return frozenset.intersection(*known) if known else None

    def where(self, row: int) -> str:
        """The address of a row, for messages: `file:line`."""
        window, number = self._find(row)
        return self._windows[window].file.where(number)

    def read(self, rows: Sequence[int]) -> list[Row]:
        """These rows, in this order. Raises ChangedDataError where one of them is not as it was."""
        by_window: dict[int, list[tuple[int, int]]] = {}
        for place, row in enumerate(rows):
            window, number = self._find(row)
            by_window.setdefault(window, []).append((place, number))
        read: list[Row] = [{}] * len(rows)
        for window, wanted in by_window.items():
            found = self._windows[window].file.read([number for _, number in wanted])
            for (place, _), row in zip(wanted, found, strict=True):
                read[place] = row
        return read

    def blocks(self, digest: hashlib._Hash) -> Iterator[list[Row]]:
        """All rows in order, a block at a time. `digest` takes what they are made of, wherever the files lie.

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
    """Opens `.jsonl` and `.parquet` files and folders of them, whole or as `path@[start:end]`, one after another.

    `columns` are those that will be looked at (all where None); a row may come with more. Blank lines are not rows.
    Raises FileNotFoundError, and ValueError for an unknown kind of file and for a path that names no row.
    """
    paths = [data_paths] if isinstance(data_paths, str) else data_paths
    return RowSet(" ".join(paths), [window for path in paths for window in _windows(path, columns)])


def _windows(data_path: str, columns: Sequence[str] | None) -> list[_Window]:
    wanted = DataPath.parse(data_path)
    files = [_open(file, columns) for file in files_of(wanted.path)]
    start, end, _ = wanted.rows.indices(sum(len(file) for file in files))
    windows, before = [], 0
    for file in files:
        first, last = max(start - before, 0), min(end - before, len(file))
        if first < last:
            windows.append(_Window(file, first, last))
        before += len(file)
    if not windows:
        raise ValueError(f"data file {data_path} holds no rows: give a file (and slice) with at least one row")
    return windows


def _open(path: Path, columns: Sequence[str] | None) -> JsonlFile | ParquetFile:
    if path.suffix == ".jsonl":
        return JsonlFile(path)
    # imported here: it takes 50 MB, and most data is JSON lines
    from slimrl.data.parquet import ParquetFile

    return ParquetFile(path, columns)
