"""Checks prompt data before anything starts: the first rows of each file and a sample of the rest, in bounded time.

Needs neither torch nor a tokenizer, stops at a deadline, and uses the run's own check of rows
(`prompt_format.validate_row`). Called by the flag validation; the run itself checks every row.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from slimrl.data.preference_pairs import AnswerColumns, pair_of
from slimrl.data.prompt_format import InvalidRow, PromptFormat, Row, metadata_of, validate_row

if TYPE_CHECKING:
    import pyarrow.parquet

FIRST_ROWS = 1000
SAMPLED_ROWS = 1000
_Item = TypeVar("_Item")
_COUNTED_BYTES = 256 << 20  # lines are counted up to this offset; later rows are reported by byte offset


@dataclasses.dataclass
class FilePreview:
    """Result for one file: number of rows read, the bad ones as "<file>:<line>: <reason>", the first row's columns.

    `columns` is None if no row is an object. `ended_early` is set at the deadline, or if the file cannot be decoded
    here: the file may have rows even if `rows` is 0. `labels` are those of labelled answers. `messages`: a pair or a
    labelled answer is of messages, not of text.
    """

    rows: int = 0
    bad: list[str] = dataclasses.field(default_factory=list)
    columns: list[str] | None = None
    ended_early: bool = False
    labels: set[bool] = dataclasses.field(default_factory=set)
    messages: bool = False


class _EndedEarlyError(Exception):
    """The preview of the file ends before its last row; the file is not at fault."""


def preview_file(path: Path, rows: slice, form: PromptFormat, *, seconds: float) -> FilePreview:
    """Checks `rows` of a .jsonl or .parquet file for about `seconds`. Raises ValueError or OSError if it is neither.

    For a slice that counts from the end, only the file's first row is checked. Without pyarrow, Parquet files are not
    checked.
    """
    deadline = time.monotonic() + seconds
    if path.suffix == ".parquet":
        found = _parquet_rows(path, form, rows, deadline)
    else:
        found = _jsonl_rows(path, rows, deadline)
    preview = FilePreview()
    try:
        for where, row in _in_time(found, deadline):
            preview.rows += 1
            if preview.columns is None and isinstance(row, dict):
                preview.columns = list(row)
            fault = validate_row(row, form) or _teacher_fault(row, form, path)
            if fault is not None:
                preview.bad.append(f"{where}: {fault}")
            elif isinstance(row, dict) and form.pair is not None:
                preview.messages |= not isinstance(pair_of(row, form.input_key, form.pair).prompt, str)
                if isinstance(form.pair, AnswerColumns):
                    preview.labels.add(bool(row[form.pair.label]))
    except _EndedEarlyError:
        preview.ended_early = True
    return preview


def _teacher_fault(row: Row, form: PromptFormat, path: Path) -> str | None:
    """Why a valid row has no teacher; None if it has one, or needs none."""
    try:
        if form.teachers is not None and isinstance(row, dict):
            form.teachers.of(metadata_of(row, form), str(path))
    except ValueError as error:
        return str(error)
    return None


def _in_time(items: Iterable[_Item], deadline: float) -> Iterator[_Item]:
    """The items until the deadline, at least one."""
    for item in items:
        yield item
        if time.monotonic() > deadline:
            raise _EndedEarlyError


def _window(rows: slice) -> tuple[int, int, bool]:
    """First row, number of consecutive rows to check, and whether the rest of the file may be sampled."""
    start, end = rows.start or 0, rows.stop
    if start < 0 or (end is not None and end < 0):
        return 0, 1, False
    return start, max(0, min(FIRST_ROWS, end - start)) if end is not None else FIRST_ROWS, end is None


def _jsonl_rows(path: Path, rows: slice, deadline: float) -> Iterator[tuple[str, Row]]:
    start, count, sampled = _window(rows)
    with path.open("rb") as file:
        lines = ((number, line) for number, line in enumerate(_in_time(file, deadline), start=1) if line.strip())
        for number, line in itertools.islice(lines, start, start + count):
            yield f"{path}:{number}", _parsed(line)
        if sampled:
            first, end = file.tell(), path.stat().st_size
            yield from _sampled_lines(path, file, first, end)


def _sampled_lines(path: Path, file: BinaryIO, first: int, end: int) -> Iterator[tuple[str, Row]]:
    """Rows at even distances between two offsets."""
    seen, counted = first, (0, 1)
    for index in range(SAMPLED_ROWS):
        file.seek(first + (end - first) * index // SAMPLED_ROWS)
        file.readline()
        offset = file.tell()
        if offset < seen:
            continue
        line = file.readline()
        seen = file.tell()
        if not line.strip():
            continue
        row = _parsed(line)
        if isinstance(row, InvalidRow) and offset <= _COUNTED_BYTES:
            counted = _count_lines(path, offset, counted)
            yield f"{path}:{counted[1]}", row
        else:
            yield f"{path}, byte {offset}", row


def _count_lines(path: Path, offset: int, counted: tuple[int, int]) -> tuple[int, int]:
    """`offset` and the number of the line that starts there, counted from `counted`, an earlier such pair."""
    at, number = counted
    with path.open("rb") as file:
        file.seek(at)
        while at < offset:
            chunk = file.read(min(1 << 20, offset - at))
            number += chunk.count(b"\n")
            at += len(chunk)
    return offset, number


def _parsed(line: bytes) -> Row:
    try:
        row: Any = json.loads(line.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        return InvalidRow(f"not UTF-8 text: {error.reason} at byte {error.start} of the line")
    except ValueError as error:
        return InvalidRow(f"not valid JSON: {error}")
    return (
        row if isinstance(row, dict) else InvalidRow(f"a row must be a JSON object, this one is {type(row).__name__}")
    )


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _parquet_rows(path: Path, form: PromptFormat, rows: slice, deadline: float) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow  # takes 0.2 s, only for Parquet files
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise _EndedEarlyError from None  # scripts check flags before the environment is installed
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"is not a Parquet file ({error})") from error
    names = file.schema_arrow.names
    lacking = [key for key in form.required if key not in names]
    if lacking or not file.metadata.num_rows:
        if file.metadata.num_rows:
            yield f"{path}: row 1", dict.fromkeys(names)
        return
    columns = [name for name in names if name in form.columns]
    start, count, sampled = _window(rows)
    groups = range(file.metadata.num_row_groups)
    firsts = list(itertools.accumulate((file.metadata.row_group(group).num_rows for group in groups), initial=0))
    # row groups before the slice are not decoded
    batches = itertools.chain.from_iterable(
        _batches(file, group, firsts[group], columns) for group in groups if firsts[group + 1] > start
    )
    read = ((first + at, row) for first, batch in _in_time(batches, deadline) for at, row in enumerate(batch))
    for number, row in itertools.islice((one for one in read if one[0] >= start), count):
        yield f"{path}: row {number + 1}", row
    for group in groups if sampled else ():
        if firsts[group] >= start + count:
            _, batch = next(_batches(file, group, firsts[group], columns), (0, []))
            yield from ((f"{path}: row {firsts[group] + at + 1}", row) for at, row in enumerate(batch))


def _batches(
    file: pyarrow.parquet.ParquetFile, group: int, first: int, columns: list[str]
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The rows of a row group in batches, each with the number of its first row; `first` is the group's first row."""
    for batch in file.iter_batches(batch_size=64, row_groups=[group], columns=columns, use_threads=False):
        yield first, batch.to_pylist()
        first += batch.num_rows
