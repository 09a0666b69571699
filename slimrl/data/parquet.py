"""Random access to Parquet rows: row groups are decoded on demand, and the most recently used ones are cached.

The cache stays within a memory budget, or holds one row group that is larger. Called by `slimrl.data.readers`.
"""

from __future__ import annotations

import bisect
import itertools
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.parquet

from slimrl.data.prompt_format import Row
from slimrl.data.readers import CHUNK, Digest, WatchedFile

logger = logging.getLogger(__name__)

_BUDGET = 64 << 20  # bytes of cached row groups
_BLOCK_ROWS = 1024


class ParquetFile:
    """The rows of one `.parquet` file; only `columns` are read (None: all)."""

    def __init__(self, path: Path, columns: Sequence[str] | None) -> None:
        self._path = path
        self._watched = WatchedFile(path)
        try:
            self._file = pyarrow.parquet.ParquetFile(self._watched.own_path)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"data file {path} is not a Parquet file: {error}") from error
        self.columns = frozenset(self._file.schema_arrow.names)
        self._wanted = [name for name in self._file.schema_arrow.names if columns is None or name in columns]
        footer = self._file.metadata
        counts = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
        self._ends = list(itertools.accumulate(counts))
        self._decoded: OrderedDict[int, pyarrow.Table] = OrderedDict()
        largest = max((footer.row_group(group).total_byte_size for group in range(footer.num_row_groups)), default=0)
        if largest > _BUDGET and footer.num_row_groups > 1:
            logger.warning(
                "%s has row groups of up to %d MB, and reading one row decodes its whole group: rewrite it with"
                " pyarrow.parquet.write_table(..., row_group_size=1000), or as .jsonl",
                path,
                largest >> 20,
            )

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def where(self, row: int) -> str:
        """`file: row n`, counted from 1."""
        return f"{self._path}: row {row + 1}"

    def read(self, rows: Sequence[int]) -> list[Row]:
        """These rows, in this order; a row group is decoded at most once per call.

        Raises ChangedDataError if the file was overwritten before a row group was decoded.
        """
        by_group: dict[int, list[int]] = {}
        for position, row in enumerate(rows):
            by_group.setdefault(bisect.bisect_right(self._ends, row), []).append(position)
        result: list[Row] = [{}] * len(rows)
        for group, positions in by_group.items():
            first = self._ends[group - 1] if group else 0
            taken = self._group(group).take([rows[position] - first for position in positions])
            for position, row in zip(positions, taken.to_pylist(), strict=True):
                result[position] = row
        return result

    def blocks(self, start: int, end: int, digest: Digest) -> Iterator[list[Row]]:
        """Rows start to end-1 in order, in blocks; updates `digest` with the file's bytes and the bounds."""
        for number, offset in enumerate(range(0, self._watched.size, CHUNK)):
            chunk = self._watched.read(offset, min(offset + CHUNK, self._watched.size))
            self._watched.add_chunk(number, chunk)
            digest.update(chunk)
        digest.update(f"{start}:{end}".encode())
        # a separate reader: `read` may run at the same time in another thread
        file, first = pyarrow.parquet.ParquetFile(self._watched.own_path), 0
        for batch in file.iter_batches(batch_size=_BLOCK_ROWS, columns=self._wanted, use_threads=False):
            low, high = max(start - first, 0), min(end - first, batch.num_rows)
            if low < high:
                yield batch.slice(low, high - low).to_pylist()
            first += batch.num_rows

    def _group(self, group: int) -> pyarrow.Table:
        if group in self._decoded:
            self._decoded.move_to_end(group)
            return self._decoded[group]
        first = self._ends[group - 1] if group else 0
        rows = f"row {first + 1} to {self._ends[group]}"
        try:
            table = self._file.read_row_group(group, columns=self._wanted, use_threads=False)
        except (OSError, pyarrow.ArrowInvalid):
            self._watched.compare(0, self._watched.size, rows)  # a changed file usually fails to decode
            raise
        if not self._watched.is_untouched():
            self._watched.compare(0, self._watched.size, rows)
        self._decoded[group] = table
        while len(self._decoded) > 1 and sum(kept.nbytes for kept in self._decoded.values()) > _BUDGET:
            self._decoded.popitem(last=False)
        return table
