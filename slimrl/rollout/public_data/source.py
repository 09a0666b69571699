"""Finds and reads the files of a published data set: a file, a folder or an id of the Hugging Face hub.

Promises that every row comes with its address, and one that is not an object as a BadRow. Called by
`tools/prepare_data.py`.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from slimrl.data.bad_row import BadRow, Row
from slimrl.data.readers import open_rows

SPLITS = ("train", "test", "validation")
_KINDS = (".parquet", ".jsonl", ".jsonl.gz", ".json")
# what describes a set and lies beside its rows
_NOT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "metadata.json")
_SET_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def local_folder(source: str) -> Path:
    """`source` where it exists, else the folder into which the data set of that id was downloaded.

    Raises FileNotFoundError where there is neither.
    """
    path = Path(source)
    if path.exists():
        return path
    if not _SET_ID.fullmatch(source):
        raise FileNotFoundError(
            f"--input {source} does not exist: give a file, a folder, or the id of a data set like openai/gsm8k"
        )
    # imported here: it takes a moment, and most runs name a folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(source, repo_type="dataset", allow_patterns=[f"*{kind}" for kind in _KINDS]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"--input {source} is no folder here, and the data set of that id could not be downloaded ({reason}): check"
            " the spelling and the network, or give a folder"
        ) from error


def files_by_split(path: Path, parts: Sequence[str], folders: Sequence[str]) -> dict[str, list[Path]]:
    """The data files at `path` by split; a file that names no split is of "train".

    Only `folders` of it are looked at, where there are any. Else, where it holds a folder named in `parts`, only the
    first such one is: published sets often hold the same rows in several ways. Raises FileNotFoundError where there is
    no such folder or no data file.
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
        raise FileNotFoundError(f"--input {path} holds no {', '.join(_KINDS)} file: give the folder of the data set")
    return found


def read_file(path: Path) -> Iterator[tuple[str, Row]]:
    """Each row of a file with its address, in order. A `.json` file holds one row or a list of them."""
    if path.name.endswith(".jsonl.gz"):
        with gzip.open(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", _row(line)
    elif path.suffix == ".json":
        content = _parsed(path.read_bytes())
        for number, value in enumerate(content if isinstance(content, list) else [content], 1):
            yield f"{path}: row {number}", value if isinstance(value, dict | BadRow) else BadRow("not a JSON object")
    else:
        rows = open_rows(str(path))
        values = (value for block in rows.blocks(hashlib.blake2b()) for value in block)
        for number, value in enumerate(values):
            yield rows.where(number), value


def _split_of(path: Path) -> str:
    """By the name of the file, else by the folder nearest to it."""
    for part in reversed(path.parts):
        for split in SPLITS:
            if re.match(rf"{split}(?![a-z])", part.lower()):
                return split
    return SPLITS[0]


def _row(line: bytes) -> Row:
    value = _parsed(line)
    return value if isinstance(value, dict | BadRow) else BadRow("not a JSON object")


def _parsed(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except ValueError as error:
        return BadRow(f"not valid JSON: {error}")
