"""A folder of a reference model's log-probabilities, by the content of the samples, for later epochs and runs.

`reference.json` says of which reference they are: a checksum of its weights, and the settings on which the values
depend. Every other file has the values of some samples. It is written under a temporary name and renamed, has a name of
its own, its checksum and that of `reference.json`. So any number of processes and runs may read and write the folder at
the same time: a file is read as a whole or not at all, and never if it is of another reference. A sample that two of
them computed is stored twice, and the first file by name counts.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from slimrl.processes.files import OptionalFiles, atomic_file, listed

logger = logging.getLogger(__name__)

MARKER_NAME = "reference.json"
FLAG = "--precompute-ref-log-probs"
_FORMAT = "slimrl-reference-log-probs-1"
_SUFFIX = ".safetensors"
_KEY_BYTES = 16
_COLUMNS = ("keys", "lengths", "log_probs")
LogProbs: TypeAlias = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class ReferenceIdentity:
    """What the values are of; `settings` are plain data by the name of their flag."""

    weights: str  # their checksum
    settings: Mapping[str, Any]
    place: str = ""  # the checkpoint's path when the folder was begun, for messages only

    @property
    def digest(self) -> str:
        """Equal for equal weights and settings."""
        return xxhash.xxh3_128_hexdigest(json.dumps([self.weights, self.settings], sort_keys=True).encode())


def sample_key(tokens: npt.NDArray[np.int64], response_length: int, images: bytes = b"") -> bytes:
    """The key of a sample, 16 bytes: its tokens, how many of them are the response, and what is in its `images`.

    The loss mask is no part of it: the values are those of every response token.
    """
    hashed = xxhash.xxh3_128(response_length.to_bytes(8, "little"))
    hashed.update(np.ascontiguousarray(tokens, dtype="<i8").tobytes())
    hashed.update(images)
    return hashed.digest()


def folder_fault(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Why a run with `settings` cannot use `folder`, as far as that is known without the weights; None if it can."""
    marker = folder / MARKER_NAME
    if not marker.is_file():
        others = [path.name for path in folder.iterdir() if path.name[0] != "."] if folder.is_dir() else []
        if not others:
            return None
        if not marker.is_file():  # else another run has begun the folder between the two looks
            return f"has {listed(others)} and no {MARKER_NAME}: give an empty or a new folder"
    try:
        stored = _read_marker(marker)
    except (OSError, ValueError) as error:
        return f"has a damaged {MARKER_NAME} ({error}): remove the folder, or give another one"
    wanted = _plain(settings)
    differing = [
        f"{name} is {json.dumps(stored.settings.get(name))} there and {json.dumps(wanted.get(name))} here"
        for name in sorted(stored.settings.keys() | wanted.keys())
        if stored.settings.get(name) != wanted.get(name)
    ]
    if not differing:
        return None
    return (
        f"has log-probabilities that were computed with other settings ({'; '.join(differing)}): give the same ones, or"
        " another folder"
    )


def claim(folder: Path, identity: ReferenceIdentity) -> None:
    """Makes `folder` one of this reference, by its `reference.json`, or checks that it is.

    Raises ValueError if it is of another reference or is no such folder, OSError if it cannot be written.
    """
    if fault := folder_fault(folder, identity.settings):
        raise ValueError(f"{FLAG} {folder} {fault}")
    marker = folder / MARKER_NAME
    if not marker.is_file():
        content = {"format": _FORMAT, **dataclasses.asdict(identity), "settings": _plain(identity.settings)}
        # by a name of its own: on another machine a run with the same process id may begin the folder too
        own = folder / f".{uuid.uuid4().hex}.json"
        with atomic_file(own) as unfinished:
            unfinished.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        own.replace(marker)
    stored = _read_marker(marker)  # also after writing: another run may have begun the folder at the same time
    if stored.weights != identity.weights:
        raise ValueError(
            f"{FLAG} {folder} has log-probabilities of another reference than --ref-load {identity.place}, of the"
            f" weights that {stored.place} had when it was begun: give the same reference, or another folder"
        )


def _read_marker(marker: Path) -> ReferenceIdentity:
    """Raises ValueError for a file that `claim` did not write."""
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        return ReferenceIdentity(content["weights"], dict(content["settings"]), content["place"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"it lacks {error}") from error


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives them back."""
    return dict(json.loads(json.dumps(dict(settings))))


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the values of a sample are."""

    path: Path
    start: int
    length: int


class ReferenceFolder:
    """One process's view of a claimed folder; not thread-safe. Its length is the number of known samples."""

    def __init__(self, folder: Path, identity: ReferenceIdentity) -> None:
        self._folder = folder
        self._digest = identity.digest
        self._places: dict[bytes, _Place] = {}
        self._seen: set[Path] = set()
        self._files = OptionalFiles(f"reference log-probabilities into {FLAG} {folder}")
        self._scan()

    def __len__(self) -> int:
        return len(self._places)

    def find(self, keys: Sequence[bytes]) -> list[LogProbs | None]:
        """The values of each sample, float32 [response tokens]; None for those that the folder does not have.

        Looks for new files if any is missing. A file that can no longer be read is left out, with a log line.
        """
        if any(key not in self._places for key in keys):
            self._scan()
        found: list[LogProbs | None] = [None] * len(keys)
        by_file: dict[Path, list[int]] = {}
        for number, key in enumerate(keys):
            if (place := self._places.get(key)) is not None:
                by_file.setdefault(place.path, []).append(number)
        for path, numbers in by_file.items():
            places = [self._places[keys[number]] for number in numbers]
            for number, values in zip(numbers, self._read(path, places), strict=True):
                found[number] = values
        return found

    def add(self, samples: Mapping[bytes, LogProbs]) -> None:
        """Stores the values of these samples in a new file; on a full disk they are left out, with a warning."""
        if not samples:
            return
        lengths = np.array([len(values) for values in samples.values()], dtype=np.int64)
        keys = np.frombuffer(b"".join(samples), dtype=np.uint8).reshape(-1, _KEY_BYTES)
        columns: dict[str, npt.NDArray[Any]] = {
            "keys": keys,
            "lengths": lengths,
            "log_probs": np.concatenate([np.asarray(values, dtype=np.float32) for values in samples.values()]),
        }
        path = self._folder / f"{uuid.uuid4().hex}{_SUFFIX}"
        if self._files.attempt(lambda: self._write(path, columns)):
            self._seen.add(path)
            self._index(path, keys, lengths)

    def _write(self, path: Path, columns: dict[str, npt.NDArray[Any]]) -> None:
        from safetensors.numpy import save

        about = {"format": _FORMAT, "reference": self._digest, "checksum": _checksum(columns)}
        with atomic_file(path) as unfinished:
            unfinished.write_bytes(save(columns, metadata=about))

    def _scan(self) -> None:
        """Adds the samples of files that were not there before."""
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            if path not in self._seen:
                self._seen.add(path)
                self._add_file(path)

    def _add_file(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="numpy") as file:
                about = file.metadata() or {}
                columns = {name: file.get_tensor(name) for name in _COLUMNS}
        except (OSError, SafetensorError) as error:
            logger.warning("%s is not read, its samples are computed again: %s", path, error)
            return
        if about.get("format") != _FORMAT or about.get("checksum") != _checksum(columns):
            logger.warning("%s is damaged, its samples are computed again: remove it", path)
        elif about.get("reference") != self._digest:
            logger.warning("%s has log-probabilities of another reference and is not read: remove it", path)
        else:
            self._index(path, columns["keys"], columns["lengths"])

    def _index(self, path: Path, keys: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int64]) -> None:
        starts = np.cumsum(lengths) - lengths
        for key, start, length in zip(keys, starts.tolist(), lengths.tolist(), strict=True):
            self._places.setdefault(key.tobytes(), _Place(path, start, length))

    def _read(self, path: Path, places: Sequence[_Place]) -> list[LogProbs | None]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="numpy") as file:
                column = file.get_slice("log_probs")
                return [column[place.start : place.start + place.length] for place in places]
        except (OSError, SafetensorError) as error:
            logger.warning("%s can no longer be read, its samples are computed again: %s", path, error)
            self._places = {key: place for key, place in self._places.items() if place.path != path}
            return [None] * len(places)


def _checksum(columns: Mapping[str, npt.NDArray[Any]]) -> str:
    hashed = xxhash.xxh3_128()
    for name in _COLUMNS:
        hashed.update(np.ascontiguousarray(columns[name]).tobytes())
    return hashed.hexdigest()
