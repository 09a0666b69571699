"""Reads data sets row by row: JSON lines and Parquet, whole or as `path@[start:end]`.

A row that cannot be read is never skipped: every bad row is named with its file and line in one error.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet

_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d+)?:(?P<end>-?\d+)?\]", re.DOTALL)
_LONG_INTEGER = re.compile(rb"\d{19}")
_MAX_LISTED = 20


@dataclasses.dataclass(frozen=True)
class DataPath:
    """A data file and the rows wanted of it, as Python slices count them."""

    path: Path
    rows: slice

    @classmethod
    def parse(cls, text: str) -> DataPath:
        """`file.jsonl` or `file.jsonl@[start:end]`; either bound may be left out or negative."""
        match = _SLICE.fullmatch(text)
        if match is None:
            if "@[" in text:
                raise ValueError(f"data path {text!r}: a slice is written path@[start:end] with whole numbers")
            return cls(Path(text), slice(None))
        start, end = (int(match[name]) if match[name] else None for name in ("start", "end"))
        return cls(Path(match["path"]), slice(start, end))


def read_rows(data_path: str) -> list[dict[str, Any]]:
    """The rows of a `.jsonl` or `.parquet` file in file order, one dict per row.

    Blank lines of a JSON lines file are not rows. Raises FileNotFoundError, and ValueError for an unknown
    kind of file, for rows that are not JSON objects (all of them named) and for a slice that leaves no row.
    """
    wanted = DataPath.parse(data_path)
    path = wanted.path
    if not path.is_file():
        raise FileNotFoundError(f"data file {path} does not exist: give an existing .jsonl or .parquet file")
    if path.suffix == ".jsonl":
        rows = _read_jsonl(path, wanted.rows)
    elif path.suffix == ".parquet":
        rows = _read_parquet(path, wanted.rows)
    else:
        raise ValueError(f"data file {path}: the kind {path.suffix!r} is not known, use .jsonl or .parquet")
    if not rows:
        raise ValueError(f"data file {data_path} holds no rows: give a file (and slice) with at least one row")
    return rows


def _read_jsonl(path: Path, wanted: slice) -> list[dict[str, Any]]:
    numbered = [(number, line) for number, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]
    rows: list[dict[str, Any]] = []
    bad: list[str] = []
    for number, line in numbered[wanted]:
        try:
            row = _parse(line)
        except ValueError as error:
            bad.append(f"{path}:{number}: not valid JSON: {error}")
            continue
        if isinstance(row, dict):
            rows.append(row)
        else:
            bad.append(f"{path}:{number}: a row must be a JSON object, this one is {type(row).__name__}")
    raise_for_bad_rows(str(path), bad)
    return rows


def _parse(line: bytes) -> Any:
    """orjson turns integers of more than 64 bits into floats; such a line is left to the standard library."""
    if _LONG_INTEGER.search(line):
        orjson.loads(line)  # the same strictness for every line: json alone would let NaN pass
        return json.loads(line)
    return orjson.loads(line)


def _read_parquet(path: Path, wanted: slice) -> list[dict[str, Any]]:
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"data file {path} is not a Parquet file: {error}") from error
    start, end, _ = wanted.indices(table.num_rows)
    return table.slice(start, max(end - start, 0)).to_pylist()


def raise_for_bad_rows(source: str, bad: list[str]) -> None:
    """Raises ValueError listing `bad` (one sentence per row, the first twenty in full); nothing where it is empty."""
    if not bad:
        return
    more = [f"and {len(bad) - _MAX_LISTED} more"] if len(bad) > _MAX_LISTED else []
    raise ValueError("\n  ".join([f"{len(bad)} bad rows in {source}, mend or remove them:", *bad[:_MAX_LISTED], *more]))
