"""Command-line syntax of datasets: `path`, `path@[start:end]`, and several of them with probabilities.

Parses only, opens no file. The flag validation and the readers share this module, so that both accept the same paths.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path

DATA_KINDS = (".jsonl", ".parquet")

_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d+)?:(?P<end>-?\d+)?\]", re.DOTALL)
_WEIGHTED = re.compile(r"(?P<path>.+)=(?P<number>[0-9][0-9.eE+-]*|\.[0-9]+)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class DataPath:
    """A data file, or a folder of them, and a Python slice of its rows."""

    path: Path
    rows: slice

    @classmethod
    def parse(cls, text: str) -> DataPath:
        """Parses `file.jsonl` or `file.jsonl@[start:end]`; either bound may be omitted or negative."""
        match = _SLICE.fullmatch(text)
        if match is None:
            if "@[" in text:
                raise ValueError(f"data path {text!r}: a slice is written path@[start:end] with whole numbers")
            return cls(Path(text), slice(None))
        start, end = (int(match[name]) if match[name] else None for name in ("start", "end"))
        return cls(Path(match["path"]), slice(start, end))


@dataclasses.dataclass(frozen=True)
class DataMix:
    """The sets of `--prompt-data`; with `probabilities` None they are concatenated to one set."""

    paths: tuple[str, ...]
    probabilities: tuple[float, ...] | None

    @classmethod
    def parse(cls, words: str | Sequence[str]) -> DataMix:
        """Parses `path`, `path path ...` or `path=probability path=probability ...`.

        A single path is used unchanged, even if it contains "=". Raises ValueError, worded to follow the flag's name,
        if only some paths have a probability, one is not above 0, or they do not sum to 1.
        """
        words = (words,) if isinstance(words, str) else tuple(words)
        if len(words) == 1:
            return cls(words, None)
        matches = [_WEIGHTED.fullmatch(word) for word in words]
        if not any(matches):
            return cls(words, None)
        bare = [word for word, match in zip(words, matches, strict=True) if match is None]
        if bare:
            raise ValueError(
                f"{' '.join(words)} gives some sets a probability but not {', '.join(bare)}: write path=probability for"
                " all sets or for none"
            )
        probabilities = tuple(_probability(match) for match in matches if match is not None)
        if not math.isclose(sum(probabilities), 1.0, abs_tol=1e-6):
            raise ValueError(
                f"{' '.join(words)} has probabilities that sum to {sum(probabilities):g}: make their sum 1"
            )
        return cls(tuple(match["path"] for match in matches if match is not None), probabilities)


def _probability(match: re.Match[str]) -> float:
    try:
        value = float(match["number"])
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise ValueError(f"{match[0]} has the probability {match['number']}: give a number between 0 and 1")
    return value


def files_of(path: Path) -> list[Path]:
    """The data files at `path`: itself, or those directly in the folder, sorted by name.

    Raises FileNotFoundError if it does not exist, ValueError if it is not a data file or has none.
    """
    kinds = " or ".join(DATA_KINDS)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in DATA_KINDS and file.is_file())
        if not files:
            raise ValueError(f"data folder {path} has no {kinds} file: give a folder with such files, or a file")
        return files
    if not path.exists():
        raise FileNotFoundError(f"data file {path} does not exist: give an existing {kinds} file, or a folder of them")
    if path.suffix not in DATA_KINDS:
        raise ValueError(f"data file {path}: unknown file type {path.suffix!r}, use {kinds}")
    return [path]
