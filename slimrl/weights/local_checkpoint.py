"""The full Hugging Face checkpoint that an engine's host keeps current (--update-weight-local-checkpoint-dir).

`pull` brings the folder to a published version: it copies a full one, and changes the tensors of the present checkpoint
in place for a delta. The name of a checkpoint's folder states its version. A checkpoint that is being written has
another name, so that one that was interrupted, at any place, is never taken for a version; so does one whose change
failed its checksum. All ranks and servers of a host may share the folder: one pulls while the others wait.

The caller answers in the published folder (`write_answer`), which is all that trainer and engine hosts share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from torch import Tensor

from slimrl.processes.files import atomic_file, check_space
from slimrl.weights.delta_files import Bytes, DeltaFileError, TensorRow, VersionIndex, apply, check, local_name
from slimrl.weights.hf_checkpoint_writer import INDEX_NAME

LOCK_NAME, BOOT_NAME = ".slimrl_checkpoint.lock", ".slimrl_boot"
UNFINISHED = "unfinished"  # name of a checkpoint that is no version
ANSWERS = "answers"  # folder in that of a published version
MOST_THREADS = 4
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class LocalCheckpoint:
    """The checkpoints in `folder`: one complete version, or none. Nothing else there is touched."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder)

    def pull(self, published: Path) -> Path:
        """Brings the checkpoint to the version in `published`; returns its folder.

        Raises DeltaFileError, and OSError or ValueError of a full disk. Without the base of a delta version the
        checkpoint stays as it is; after any other error there is none, and only a full version can be pulled.
        """
        index = VersionIndex.read(published)
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            target = self._folder / index.local_name()
            if _is_complete(target):
                return target
            if index.base_id is None or index.base_version is None:
                return self._copy(index, published, target)
            base = self._folder / local_name(index.base_version, index.base_id)
            if not _is_complete(base):
                found = [path.name for path in self._checkpoints() if _is_complete(path)]
                raise DeltaFileError(
                    f"weight version {index.version!r} changes version {index.base_version!r} ({base.name}), and"
                    f" {self._folder} has {found[0] if found else 'no complete checkpoint'}: it needs a full version"
                )
            return self._change(index, published, base, target)

    def _checkpoints(self) -> list[Path]:
        return [path for path in self._folder.iterdir() if path.name == UNFINISHED or path.name.startswith("weight_v")]

    def _copy(self, index: VersionIndex, published: Path, target: Path) -> Path:
        for old in self._checkpoints():  # first, so that the disk need not have room for two
            shutil.rmtree(old)
        files = [path for path in published.iterdir() if path.is_file()]
        check_space(self._folder, sum(path.stat().st_size for path in files))
        with self._unfinished() as unfinished:
            unfinished.mkdir()
            for path in files:
                shutil.copyfile(path, unfinished / path.name)
            checkpoint = _Tensors(unfinished, index.files)
            _on_all(index, lambda name, row: check(row, index.checksum_format, checkpoint.bytes_of(name)))
            return _completed(unfinished, target)

    def _change(self, index: VersionIndex, published: Path, base: Path, target: Path) -> Path:
        payloads = _Tensors(published, index.files)
        before = VersionIndex.read(base)
        if unknown := set(index.tensors) - set(before.tensors):
            raise DeltaFileError(f"{published} changes {sorted(unknown)[0]}, which {base.name} does not have")
        with self._unfinished() as unfinished:
            base.rename(unfinished)
            (unfinished / BOOT_NAME).unlink()
            checkpoint = _Tensors(unfinished, {name: before.files[name] for name in index.tensors}, mode="r+")

            def change(name: str, row: TensorRow) -> None:
                tensor = checkpoint.bytes_of(name)
                apply(row, payloads.bytes_of(name), tensor)
                check(row, index.checksum_format, tensor)

            _on_all(index, change)
            now = dataclasses.replace(
                index,
                base_version=None,
                base_id=None,
                encoding=None,
                tensors=before.tensors | index.tensors,
                files=before.files,
            )
            (unfinished / INDEX_NAME).write_text(now.text(), encoding="utf-8")
            return _completed(unfinished, target)

    @contextlib.contextmanager
    def _unfinished(self) -> Iterator[Path]:
        """The path of a checkpoint that is no version; it is removed if the block fails."""
        path = self._folder / UNFINISHED
        shutil.rmtree(path, ignore_errors=True)
        try:
            yield path
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _is_complete(checkpoint: Path) -> bool:
    """Whether it was completed since the machine started: what was not written to the disk before a crash is lost."""
    path = checkpoint / BOOT_NAME
    return path.is_file() and path.read_text() == _boot()


def _completed(unfinished: Path, target: Path) -> Path:
    (unfinished / BOOT_NAME).write_text(_boot())
    return unfinished.rename(target)


def _boot() -> str:
    return _BOOT.read_text() if _BOOT.exists() else ""


def _on_all(index: VersionIndex, step: Any) -> None:
    """Runs `step(name, row)` for every tensor, several at a time; an error names the tensor."""

    def named(name: str) -> None:
        try:
            step(name, index.tensors[name])
        except DeltaFileError as error:
            raise DeltaFileError(f"{name} of weight version {index.version!r}: {error}") from error

    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for done in [pool.submit(named, name) for name in index.tensors]:
            done.result()


class _Tensors:
    """The bytes of tensors in the safetensors files of a folder, mapped; with `mode` "r+" writes change the files."""

    def __init__(self, folder: Path, files: dict[str, str], mode: str = "r") -> None:
        """Raises DeltaFileError if a file is missing, incomplete, or lacks a tensor of `files`."""
        self._places: dict[str, tuple[Bytes, int, int]] = {}
        for file in sorted(set(files.values())):
            names = [name for name, own in files.items() if own == file]
            self._open(folder / file, names, mode)

    def _open(self, path: Path, names: Collection[str], mode: Any) -> None:
        try:
            mapped: Bytes = np.memmap(path, dtype=np.uint8, mode=mode)
            start = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
            header = json.loads(mapped[8:start].tobytes())
            for name in names:
                begin, end = header[name]["data_offsets"]
                if not 0 <= begin <= end <= len(mapped) - start:
                    raise ValueError(f"{name} is outside of the file")
                self._places[name] = mapped, start + begin, start + end
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DeltaFileError(f"{path} is not a complete file of weights: {error}") from error

    def bytes_of(self, name: str) -> Bytes:
        """A view of the tensor's bytes."""
        mapped, begin, end = self._places[name]
        return mapped[begin:end]


def tensors_in(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the whole checkpoint, in host memory."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no dict
                yield name, file.get_tensor(name)


# -- answers -------------------------------------------------------------------------------------------------------


def answer_path(published: Path, server: str, rank: int) -> Path:
    """The answer of one rank of a server, which the trainer calls `server`, in the published folder."""
    return published / ANSWERS / f"{server}-{rank}.json"


def write_answer(published: Path, server: str, rank: int, error: str | None) -> None:
    """States that the host of this rank has the version, or why not."""
    with atomic_file(answer_path(published, server, rank)) as path:
        path.write_text(json.dumps({"error": error}), encoding="utf-8")


def read_answer(published: Path, server: str, rank: int, timeout_s: float, poll_s: float = 0.05) -> str | None:
    """The error of the rank, if any; waits for the answer, which a network file system may show late.

    Raises TimeoutError.
    """
    path, deadline = answer_path(published, server, rank), time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(FileNotFoundError):
            found: str | None = json.loads(path.read_text(encoding="utf-8"))["error"]
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer of rank {rank} within {timeout_s:g} s in {path.parent}")
        time.sleep(poll_s)
