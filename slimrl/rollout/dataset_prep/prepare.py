"""Converts a published dataset (file, folder or Hugging Face id) to one `.jsonl` file per split.

Files are written atomically and never overwritten. Every row is counted as written, repeated, skipped or bad. Rows that
are not a JSON object are `InvalidRow`s. tools/prepare_data.py calls it.
"""

from __future__ import annotations

import collections
import dataclasses
import gzip
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import orjson

from slimrl.data.prompt_format import InvalidRow, Row, bad_rows_error
from slimrl.data.readers import open_rows
from slimrl.rollout.dataset_prep.layouts import (
    SkippedRowError,
    answers_of_pair,
    is_labelled,
    is_tree,
    labelled_row,
    preference_row,
    problem_row,
    tree_pairs,
)

SPLITS = ("train", "test", "validation")
_KINDS = (".parquet", ".jsonl", ".jsonl.gz", ".json")
# files that describe a dataset and have no rows
_NOT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "metadata.json")
_SET_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def local_folder(source: str) -> Path:
    """`source` if it exists, else the folder into which the dataset of that id was downloaded.

    Raises FileNotFoundError if neither exists.
    """
    path = Path(source)
    if path.exists():
        return path
    if not _SET_ID.fullmatch(source):
        raise FileNotFoundError(
            f"--input {source} does not exist: give a file, a folder, or the id of a dataset like openai/gsm8k"
        )
    # imported here: it is slow, and most runs give a folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(source, repo_type="dataset", allow_patterns=[f"*{kind}" for kind in _KINDS]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"--input {source} is not a local folder, and the dataset of that id could not be downloaded ({reason}):"
            " check the spelling and the network, or give a folder"
        ) from error


def files_by_split(path: Path, parts: Sequence[str], folders: Sequence[str]) -> dict[str, list[Path]]:
    """The data files at `path` by split; a file whose path names no split belongs to "train".

    Searches only `folders`, if given. Otherwise searches only the first folder of `parts` that exists, if any:
    published datasets often have the same rows in several formats. Raises FileNotFoundError if there is no such folder
    or no data file.
    """
    if path.is_file():
        return {_split_of(Path(path.name)): [path]}
    roots = [path / folder for folder in folders] or [path / part for part in parts if (path / part).is_dir()][:1]
    found: dict[str, list[Path]] = {}
    for root in roots or [path]:
        if not root.is_dir():
            raise FileNotFoundError(f"--folders {root.name}: there is no such folder in {path}: check the spelling")
        for file in sorted(root.rglob("*")):
            inner = file.relative_to(root)
            hidden = any(part.startswith(".") for part in inner.parts)
            if file.name.endswith(_KINDS) and file.name not in _NOT_DATA and not hidden and file.is_file():
                found.setdefault(_split_of(inner), []).append(file)
    if not found:
        raise FileNotFoundError(f"--input {path} has no {', '.join(_KINDS)} file: give the folder of the dataset")
    return found


def read_file(path: Path) -> Iterator[tuple[str, Row]]:
    """Each row of a file with its location, in order. A `.json` file has one row or a list of rows."""
    if path.name.endswith(".jsonl.gz"):
        with gzip.open(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", _row(line)
    elif path.suffix == ".json":
        content = _parsed(path.read_bytes())
        for number, value in enumerate(content if isinstance(content, list) else [content], 1):
            yield (
                f"{path}: row {number}",
                value if isinstance(value, dict | InvalidRow) else InvalidRow("not a JSON object"),
            )
    else:
        rows = open_rows(str(path))
        values = (value for block in rows.blocks(hashlib.blake2b()) for value in block)
        for number, value in enumerate(values):
            yield rows.where(number), value


def _split_of(path: Path) -> str:
    """The split in the file's name, else in the name of the nearest folder."""
    for part in reversed(path.parts):
        for split in SPLITS:
            if re.match(rf"{split}(?![a-z])", part.lower()):
                return split
    return SPLITS[0]


def _row(line: bytes) -> Row:
    value = _parsed(line)
    return value if isinstance(value, dict | InvalidRow) else InvalidRow("not a JSON object")


def _parsed(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except ValueError as error:
        return InvalidRow(f"not valid JSON: {error}")


@dataclasses.dataclass(frozen=True)
class PublicSet:
    """A predefined dataset: its Hugging Face id, and the names of its prepared files."""

    hub_id: str | None  # None: given on the command line
    parts: tuple[str, ...] = ()  # folders; the first one that exists has all rows
    file_name: str | None = None  # None: by split, train.jsonl and so on
    rows: Literal["problems", "pairs", "answers"] = "problems"


PUBLIC_SETS = {
    "MATH-lighteval": PublicSet("DigitalLearningGmbH/MATH-lighteval", ("data", "MATH")),
    "dapo-math-17k": PublicSet("zhuzilin/dapo-math-17k", file_name="dapo-math-17k.jsonl"),
    "aime-2024": PublicSet("zhuzilin/aime-2024", file_name="aime-2024.jsonl"),
    "gsm8k": PublicSet("openai/gsm8k", ("main",)),
    "geo3k": PublicSet("hiyouga/geometry3k", ("data",)),
    "preference": PublicSet(None, rows="pairs"),
    "labelled-answers": PublicSet(None, rows="answers"),
}


@dataclasses.dataclass
class ConversionReport:
    """Row counts of one file; `read` is the sum of the others, except for message trees and answers of pairs."""

    path: Path
    read: int = 0
    written: int = 0
    repeated: int = 0
    skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    bad: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        counts = {"repetitions": self.repeated, **self.skipped, "bad": len(self.bad)}
        others = ", ".join(f"{name}: {count}" for name, count in counts.items() if count)
        return f"{self.path}: {self.written} of {self.read} rows" + (f" ({others})" if others else "")


def prepare(
    known: PublicSet,
    source: str,
    folder: Path,
    *,
    folders: Sequence[str],
    instruction: str | None,
    max_bad: int,
    keys: dict[str, str],
) -> list[ConversionReport]:
    """Writes the files of a dataset into `folder`; reads only the subfolders `folders`, if given.

    `instruction` is that of `problem_row`, `keys` renames the written columns, `max_bad` rows of a file may be bad.

    Raises FileExistsError if a target file exists, FileNotFoundError if the dataset does not exist, and
    InvalidRowsError if more than `max_bad` rows of a file are bad; that file is not written then.
    """
    splits = files_by_split(local_folder(source), known.parts, folders)
    if known.file_name is not None:
        splits = {known.file_name: [file for files in splits.values() for file in files]}
    targets = {split: folder / (split if split.endswith(".jsonl") else f"{split}.jsonl") for split in splits}
    for target in targets.values():
        if target.exists():
            raise FileExistsError(f"{target} already exists: remove it, or give another --output-dir")
    folder.mkdir(parents=True, exist_ok=True)

    def problems(files: list[Path], report: ConversionReport) -> Iterator[dict[str, Any]]:
        return _each(files, report, lambda row: problem_row(row, instruction))

    convert = {"problems": problems, "pairs": _pairs, "answers": _answers}[known.rows]
    return [_write_file(target, splits[split], convert, max_bad, keys) for split, target in targets.items()]


Convert = Callable[[list[Path], ConversionReport], Iterator[dict[str, Any]]]


def _write_file(
    target: Path, files: list[Path], convert: Convert, max_bad: int, keys: dict[str, str]
) -> ConversionReport:
    report = ConversionReport(target)
    seen: set[bytes] = set()
    partial = target.with_name(f".{target.name}.partial")
    try:
        with partial.open("wb") as out:
            for row in convert(files, report):
                line = orjson.dumps({keys.get(key, key): value for key, value in row.items()})
                digest = hashlib.blake2b(line, digest_size=16).digest()
                if digest in seen:
                    report.repeated += 1
                    continue
                seen.add(digest)
                report.written += 1
                out.write(line + b"\n")
        if len(report.bad) > max_bad:
            fix = "raise --max-bad-rows to skip that many, or give the dataset in another layout"
            raise bad_rows_error(", ".join(map(str, files[:3])), report.bad, max_bad, fix)
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
    return report


def _each(
    files: list[Path], report: ConversionReport, convert: Callable[[dict[str, Any]], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    for where, row in (numbered for file in files for numbered in read_file(file)):
        report.read += 1
        try:
            if isinstance(row, InvalidRow):
                raise ValueError(row.reason)
            yield convert(row)
        except SkippedRowError as reason:
            report.skipped[str(reason)] += 1
        except ValueError as error:
            report.bad.append(f"{where}: {error}")
        except (KeyError, TypeError, AttributeError) as error:
            report.bad.append(f"{where}: a column does not have the structure of this layout ({error!r})")


def _first(files: list[Path]) -> dict[str, Any]:
    """The first row that is an object, which tells the layout."""
    return next((row for file in files for _, row in read_file(file) if not isinstance(row, InvalidRow)), {})


def _answers(files: list[Path], report: ConversionReport) -> Iterator[dict[str, Any]]:
    if is_labelled(_first(files)):
        yield from _each(files, report, labelled_row)
        return
    for pair in _pairs(files, report):
        yield from answers_of_pair(pair)


def _pairs(files: list[Path], report: ConversionReport) -> Iterator[dict[str, Any]]:
    if not is_tree(_first(files)):
        yield from _each(files, report, preference_row)
        return
    rows = list(_each(files, report, dict))
    yield from tree_pairs(rows)
