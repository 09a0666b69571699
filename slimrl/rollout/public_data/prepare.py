"""From the files of a published set to one `.jsonl` file per split, with an account of every row.

Promises that a file appears whole or not at all, that nothing is overwritten, and that each row read is written,
counted as a repetition, counted as left out, or bad. Called by `tools/prepare_data.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from slimrl.data.bad_row import BadRow, bad_rows_error
from slimrl.rollout.public_data.preferences import LeftOutError, is_tree, preference_row, tree_pairs
from slimrl.rollout.public_data.problems import problem_row
from slimrl.rollout.public_data.source import files_by_split, local_folder, read_file


@dataclasses.dataclass(frozen=True)
class PublicSet:
    """A set that is known by name: where it is published, and what its prepared files are called."""

    hub_id: str | None  # None: there are many, the user names one
    parts: tuple[str, ...] = ()  # folders of which the first that is there holds all rows
    file_name: str | None = None  # None: by split, train.jsonl and so on
    holds_pairs: bool = False


PUBLIC_SETS = {
    "MATH-lighteval": PublicSet("DigitalLearningGmbH/MATH-lighteval", ("data", "MATH")),
    "dapo-math-17k": PublicSet("zhuzilin/dapo-math-17k", file_name="dapo-math-17k.jsonl"),
    "aime-2024": PublicSet("zhuzilin/aime-2024", file_name="aime-2024.jsonl"),
    "gsm8k": PublicSet("openai/gsm8k", ("main",)),
    "preference": PublicSet(None, holds_pairs=True),
}


@dataclasses.dataclass
class Account:
    """What became of the rows of one file; `read` is the sum of the others, except for trees of messages."""

    path: Path
    read: int = 0
    written: int = 0
    repeated: int = 0
    left_out: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    bad: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        counts = {"repetitions": self.repeated, **self.left_out, "bad": len(self.bad)}
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
) -> list[Account]:
    """Writes the files of a set into `folder`; only `folders` of it are read, where there are any.

    `instruction` is that of `problem_row`, `keys` renames the columns written, `max_bad` rows of a file may be bad.

    Raises FileExistsError where one of them is there already, FileNotFoundError where the set is not, and
    BadRowsError where more than `max_bad` rows of a file are bad; then nothing is left of that file.
    """
    splits = files_by_split(local_folder(source), known.parts, folders)
    if known.file_name is not None:
        splits = {known.file_name: [file for files in splits.values() for file in files]}
    targets = {split: folder / (split if split.endswith(".jsonl") else f"{split}.jsonl") for split in splits}
    for target in targets.values():
        if target.exists():
            raise FileExistsError(f"{target} is there already: remove it, or give another --output-dir")
    folder.mkdir(parents=True, exist_ok=True)
    if known.holds_pairs:
        return [_write_file(target, splits[split], _pairs, max_bad, keys) for split, target in targets.items()]

    def problems(files: list[Path], account: Account) -> Iterator[dict[str, Any]]:
        return _each(files, account, lambda row: problem_row(row, instruction))

    return [_write_file(target, splits[split], problems, max_bad, keys) for split, target in targets.items()]


Convert = Callable[[list[Path], Account], Iterator[dict[str, Any]]]


def _write_file(target: Path, files: list[Path], convert: Convert, max_bad: int, keys: dict[str, str]) -> Account:
    account = Account(target)
    seen: set[bytes] = set()
    partial = target.with_name(f".{target.name}.partial")
    try:
        with partial.open("wb") as out:
            for row in convert(files, account):
                line = orjson.dumps({keys.get(key, key): value for key, value in row.items()})
                digest = hashlib.blake2b(line, digest_size=16).digest()
                if digest in seen:
                    account.repeated += 1
                    continue
                seen.add(digest)
                account.written += 1
                out.write(line + b"\n")
        if len(account.bad) > max_bad:
            mend = "raise --max-bad-rows to leave that many out, or give the set in another layout"
            raise bad_rows_error(", ".join(map(str, files[:3])), account.bad, max_bad, mend)
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
    return account


def _each(
    files: list[Path], account: Account, convert: Callable[[dict[str, Any]], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    for where, row in (numbered for file in files for numbered in read_file(file)):
        account.read += 1
        try:
            if isinstance(row, BadRow):
                raise ValueError(row.reason)
            yield convert(row)
        except LeftOutError as reason:
            account.left_out[str(reason)] += 1
        except ValueError as error:
            account.bad.append(f"{where}: {error}")
        except (KeyError, TypeError, AttributeError) as error:
            account.bad.append(f"{where}: a column of it has another shape than in this layout ({error!r})")


def _pairs(files: list[Path], account: Account) -> Iterator[dict[str, Any]]:
    first = next((row for file in files for _, row in read_file(file) if not isinstance(row, BadRow)), {})
    if not is_tree(first):
        yield from _each(files, account, preference_row)
        return
    rows = list(_each(files, account, dict))
    yield from tree_pairs(rows)
