"""Checksums of a checkpoint's files, one for each block of 1 MiB: made while they are written, compared while read.

Owns the file `checksums.json`. Promises that a byte that was changed is told by file and place before the value it
belongs to is used, that only blocks that are wanted are read, and that no file is read a second time for it. No torch
here. Called by the writers and readers of torch_dist checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import xxhash

CHECKSUMS_NAME = "checksums.json"
BLOCK = 1 << 20  # bytes
_ALGORITHM = "xxh3_64"
_DIGITS = 16  # of one checksum in hex


class DamagedFileError(ValueError):
    """A file has not the bytes that were written."""


@dataclasses.dataclass(frozen=True)
class Checksums:
    """One file: how long it is, and the checksums of its blocks in hex, end to end."""

    bytes: int
    blocks: str


class BlockHasher:
    """Takes a file's bytes as they are written."""

    def __init__(self) -> None:
        self._count = 0
        self._hash = xxhash.xxh3_64()  # of the block that is not full yet
        self._blocks: list[str] = []

    def update(self, data: bytes | memoryview) -> None:
        """The next bytes."""
        view = memoryview(data).cast("B")
        place = 0
        while place < len(view):
            room = BLOCK - self._count % BLOCK
            part = view[place : place + room]
            self._hash.update(part)
            self._count += len(part)
            place += len(part)
            if self._count % BLOCK == 0:
                self._blocks.append(self._hash.hexdigest())
                self._hash.reset()

    def finish(self) -> Checksums:
        """Of all bytes so far."""
        last = [self._hash.hexdigest()] if self._count % BLOCK else []
        return Checksums(self._count, "".join(self._blocks + last))


class CheckedFolder:
    """The files of one checkpoint as `checksums.json` describes them; threads may share one."""

    def __init__(self, folder: Path, files: Mapping[str, Checksums]) -> None:
        self._folder = folder
        self._files = files
        self._verified = {name: bytearray(len(known.blocks) // _DIGITS) for name, known in files.items()}

    @classmethod
    def open(cls, folder: str | Path) -> CheckedFolder | None:
        """None where the checkpoint has no checksums. Raises DamagedFileError for a damaged `checksums.json`."""
        path = Path(folder) / CHECKSUMS_NAME
        try:
            content = json.loads(path.read_bytes())
            if content["algorithm"] != _ALGORITHM or content["block_bytes"] != BLOCK:
                raise DamagedFileError(
                    f"{path} has checksums by {content['algorithm']} of {content['block_bytes']} bytes each, and this"
                    f" slimrl reads {_ALGORITHM} of {BLOCK}: use the slimrl that wrote it, or remove that file to load"
                    " the checkpoint without verifying it"
                )
            if content["seal"] != _seal(content["files"]):
                raise ValueError("its own checksum differs")
            files = {name: Checksums(**entry) for name, entry in content["files"].items()}
        except FileNotFoundError:
            return None
        except DamagedFileError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedFileError(f"{path} is damaged ({error}): copy the checkpoint again") from error
        return cls(Path(folder), files)

    @property
    def names(self) -> list[str]:
        """The files that have checksums."""
        return sorted(self._files)

    def read_into(self, descriptor: int, name: str, begin: int, view: memoryview) -> int:
        """Fills `view` with the bytes of the open file from `begin` on; returns how many there were.

        Raises DamagedFileError where they are not those that were written.
        """
        known = self._files.get(name)
        if known is None:
            return read_at(descriptor, begin, view)
        end = min(begin + len(view), known.bytes)
        place = begin
        while place < end:
            number = place // BLOCK
            low, high = number * BLOCK, min((number + 1) * BLOCK, known.bytes)
            stop = min(high, end)
            part = view[place - begin : stop - begin]
            if self._verified[name][number]:
                self._read_all(descriptor, name, place, part)
            elif (place, stop) == (low, high):
                self._read_all(descriptor, name, low, part)
                self._compare(name, number, part)
            else:
                block = memoryview(bytearray(high - low))
                self._read_all(descriptor, name, low, block)
                self._compare(name, number, block)
                part[:] = block[place - low : stop - low]
            place = stop
        return max(0, end - begin)

    def check(self, names: Iterable[str] | None = None) -> int:
        """Reads these files (None: all) to the end; returns how many bytes.

        Raises DamagedFileError naming the first that is missing, of another length, or has other bytes.
        """
        total = 0
        block = memoryview(bytearray(BLOCK))
        for name in self.names if names is None else names:
            known = self._files.get(name)
            if known is None:
                continue
            path = self._folder / name
            if not path.is_file():
                raise DamagedFileError(f"{path} is missing: copy the checkpoint again, or take an older one")
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if os.fstat(descriptor).st_size != known.bytes:
                    raise _damaged(path, f"it has {os.fstat(descriptor).st_size} bytes, and {known.bytes} were written")
                for begin in range(0, known.bytes, BLOCK):
                    self.read_into(descriptor, name, begin, block[: min(BLOCK, known.bytes - begin)])
            finally:
                os.close(descriptor)
            total += known.bytes
        return total

    def _read_all(self, descriptor: int, name: str, begin: int, view: memoryview) -> None:
        if (count := read_at(descriptor, begin, view)) < len(view):
            raise _damaged(self._folder / name, f"it ends at byte {begin + count}")

    def _compare(self, name: str, number: int, block: memoryview) -> None:
        if xxhash.xxh3_64_hexdigest(block) != self._files[name].blocks[number * _DIGITS : (number + 1) * _DIGITS]:
            low = number * BLOCK
            raise _damaged(
                self._folder / name, f"bytes {low} to {low + len(block) - 1} are not those that were written"
            )
        self._verified[name][number] = 1


def read_at(descriptor: int, begin: int, view: memoryview) -> int:
    """Fills `view` from byte `begin` of a file on; returns the bytes read, fewer only at its end."""
    done = 0
    while done < len(view):  # one call reads 2 GiB at most
        count = os.preadv(descriptor, [view[done:]], begin + done)
        if count == 0:
            break
        done += count
    return done


def checksums_text(folder: Path, known: Mapping[str, Checksums]) -> str:
    """The content of `checksums.json` for the files in `folder`; those that `known` lacks are read now."""
    files = {
        path.name: dataclasses.asdict(known.get(path.name) or _checksums_of(path))
        for path in sorted(folder.iterdir())
        if path.name != CHECKSUMS_NAME
    }
    content = {"algorithm": _ALGORITHM, "block_bytes": BLOCK, "files": files, "seal": _seal(files)}
    return json.dumps(content, indent=1) + "\n"


def _checksums_of(path: Path) -> Checksums:
    hasher = BlockHasher()
    with path.open("rb") as file:
        while chunk := file.read(BLOCK):
            hasher.update(chunk)
    return hasher.finish()


def _seal(files: Mapping[str, Mapping[str, object]]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(files, sort_keys=True).encode())


def _damaged(path: Path, what: str) -> DamagedFileError:
    return DamagedFileError(f"{path} is damaged, {what}: copy the checkpoint again, or take an older one (--ckpt-step)")
