"""The files of changed weights (--update-weight-mode delta with --update-weight-transport disk), both ends.

A version is a folder like a Hugging Face checkpoint. A full version has all tensors. A delta version has, as uint8
tensors of the same names, what turns the tensors of its base version into its own: per tensor

- `xor`: the new bytes XOR the old ones, compressed with zstd. Applied twice, it gives the old bytes again.
- `overwrite`: the gaps between changed elements and their new values (`changed_elements`), compressed with zstd.
- `whole`: the new bytes, where changes would take more than a part of a bucket.

Unchanged tensors are absent. The index file has in its "metadata" the fields of `VersionIndex`, among them a checksum
of every new tensor. The receiver compares it after the change, so a wrong base and a damaged file are both found.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from slimrl.weights.hf_checkpoint_writer import INDEX_NAME

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

XOR, OVERWRITE, WHOLE = "xor", "overwrite", "whole"
COMPRESSION, COMPRESSION_LEVEL = "zstd", 1
LARGEST_PART = 0.5  # of a bucket's bytes that its changes may have
FARTHEST = 65536  # elements between two sent ones
# answers of an engine rank that applied a bucket of changes, or did not (`weights.update.transport_delta`)
ANSWERS, APPLIED = "answers", 1  # part of the bucket with one byte for each rank, and its value
REFUSED = "slimrl changes refused"  # key in the store of a broadcast's group
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DeltaFileError(ValueError):
    """Files of changed weights that cannot be applied: damaged, or to another version than the one that is here."""


@dataclasses.dataclass(frozen=True)
class TensorDelta:
    """The sent elements of one tensor of `shape`: `gaps` [sent] uint16, `values` [sent] in the bytes of its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    gaps: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]


def changed_elements(name: str, shape: tuple[int, ...], old: Tensor, new: Tensor) -> TensorDelta:
    """The elements in which two flat tensors of one dtype differ in their bits."""
    bits = _INTEGERS[new.itemsize]
    before, after = old.view(bits).numpy(), new.view(bits).numpy()
    places = np.flatnonzero(before != after)
    gaps = np.diff(places, prepend=-1) - 1
    for index in np.flatnonzero(gaps >= FARTHEST)[::-1]:
        start = places[index] - gaps[index] - 1
        between = np.arange(start + FARTHEST, places[index], FARTHEST)
        places = np.insert(places, index, between)
    gaps = np.diff(places, prepend=-1) - 1
    return TensorDelta(name, shape, new.dtype, gaps.astype(np.uint16), after[places])


def set_elements(target: Bytes, itemsize: int, gaps: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
    """Writes the sent elements, of `itemsize` bytes each, into `target`, the bytes of a tensor."""
    places = (gaps.astype(np.int64) + 1).cumsum() - 1
    target.view(f"u{itemsize}")[places] = values.view(f"u{itemsize}")


# -- checksums -----------------------------------------------------------------------------------------------------


def _blake3(data: Bytes) -> str:
    digest: str = importlib.import_module("blake3").blake3(data.data).hexdigest()
    return digest


CHECKSUMS: dict[str, Callable[[Bytes], str]] = {
    "xxh3-128": lambda data: xxhash.xxh3_128_hexdigest(data.data),
    "adler32": lambda data: f"{zlib.adler32(data.data):08x}",
    "blake3": _blake3,  # an optional package: `arguments.validation` rejects it where it is absent
}


# -- the index -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TensorRow:
    """How one tensor of a version is in its files, its dtype's bytes, and the checksum of its new bytes.

    `sent` is the number of elements of an `overwrite`.
    """

    form: str
    itemsize: int
    checksum: str
    sent: int = 0


@dataclasses.dataclass(frozen=True)
class VersionIndex:
    """The description of a version.

    `id` is unique; two attempts to publish one `version` have different ids. A full version has no base. `files` has
    the file of each tensor.
    """

    version: str
    id: str
    base_version: str | None
    base_id: str | None
    encoding: str | None
    checksum_format: str
    tensors: dict[str, TensorRow]
    files: dict[str, str]

    def text(self) -> str:
        """The content of the index file."""
        compression = COMPRESSION if self.base_id is not None else None
        metadata = {
            "version": self.version,
            "id": self.id,
            "base_version": self.base_version,
            "base_id": self.base_id,
            "delta_encoding": self.encoding,
            "compression_format": compression,
            "checksum_format": self.checksum_format,
            "tensors": {name: dataclasses.asdict(row) for name, row in self.tensors.items()},
        }
        return json.dumps({"metadata": metadata, "weight_map": dict(sorted(self.files.items()))}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> VersionIndex:
        """The index of a version's folder; raises DeltaFileError if it has none that can be read."""
        path = folder / INDEX_NAME
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            found = index["metadata"]
            rows = {name: TensorRow(**row) for name, row in found["tensors"].items()}
            files: dict[str, str] = index["weight_map"]
            if set(files) != set(rows):
                raise DeltaFileError(f"{path} does not have a file for every tensor")
            version, base = (found["version"], found["id"]), (found["base_version"], found["base_id"])
            return cls(*version, *base, found["delta_encoding"], found["checksum_format"], rows, files)
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise DeltaFileError(f"{path} does not describe a version of weights: {error}") from error

    def local_name(self) -> str:
        """The folder of this version among the checkpoints of a host."""
        return local_name(self.version, self.id)


def local_name(version: str, version_id: str) -> str:
    """See `VersionIndex.local_name`."""
    return f"weight_v{version:0>6}-{version_id}"


# -- one tensor ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Change:
    """A tensor's row in the index, and its bytes in the file."""

    row: TensorRow
    payload: Bytes


def encode(old: Tensor, new: Tensor, encoding: str, checksum: str) -> Change | None:
    """What turns `old` into `new`, flat host tensors of one dtype; None if they have the same bits."""
    before, after = old.view(torch.uint8).numpy(), new.view(torch.uint8).numpy()
    sent = 0
    if encoding == XOR:
        raw = before ^ after
        if not raw.any():
            return None
    else:
        delta = changed_elements("", (), old, new)
        if not len(delta.gaps):
            return None
        sent = len(delta.gaps)
        raw = np.concatenate([delta.gaps.view(np.uint8), delta.values.view(np.uint8)])
    row = TensorRow(encoding, new.itemsize, CHECKSUMS[checksum](after), sent)
    return Change(row, np.frombuffer(_codec().compress(raw.data, asbytes=True), dtype=np.uint8))


def whole(new: Tensor, checksum: str) -> Change:
    """All bytes of `new`, a flat host tensor."""
    after = new.view(torch.uint8).numpy()
    return Change(TensorRow(WHOLE, new.itemsize, CHECKSUMS[checksum](after)), after)


def apply(row: TensorRow, payload: Bytes, target: Bytes) -> None:
    """Changes `target`, the bytes of a tensor, in place. Raises DeltaFileError if the payload cannot be its change."""
    try:
        if row.form == XOR:
            target ^= _decompressed(payload, len(target))
        elif row.form == OVERWRITE:
            raw = _decompressed(payload, row.sent * (2 + row.itemsize))
            values = np.frombuffer(raw[2 * row.sent :].tobytes(), dtype=f"u{row.itemsize}")
            set_elements(target, row.itemsize, raw[: 2 * row.sent].view(np.uint16), values)
        elif row.form == WHOLE:
            target[:] = payload
        else:
            raise DeltaFileError(f"{row.form!r} is not a form of changed weights")
    except (OSError, ValueError, IndexError) as error:
        raise DeltaFileError(f"the bytes in the file are not a change of this tensor ({error})") from error


def check(row: TensorRow, checksum_format: str, data: Bytes) -> None:
    """Raises DeltaFileError unless `data` has the row's checksum."""
    if (found := CHECKSUMS[checksum_format](data)) != row.checksum:
        raise DeltaFileError(f"its {checksum_format} checksum is {found} instead of {row.checksum}")


def _codec() -> Any:
    """A new one for each call: they are not thread-safe."""
    import pyarrow  # takes 0.2 s, only for these files

    return pyarrow.Codec(COMPRESSION, compression_level=COMPRESSION_LEVEL)


def _decompressed(payload: Bytes, nbytes: int) -> Bytes:
    raw = np.frombuffer(_codec().decompress(payload.data, nbytes, asbytes=True), dtype=np.uint8)
    if len(raw) != nbytes:
        raise DeltaFileError(f"{len(raw)} bytes instead of {nbytes}")
    return raw
