"""Checkpoint folders on disk: writes them atomically, finds the newest, deletes old ones.

`<dir>/latest_checkpointed_iteration.txt` names the newest complete checkpoint: a number k for the folder
`iter_000000k`, or `release` for a converted model. A checkpoint is written under `<name>.tmp`, its manifest last, then
renamed, and then named in the tracker file; before a checkpoint's files are deleted, it is renamed back.
`Retention` (--save-total-limit, --save-retain-interval) keeps the newest complete checkpoint and everything that
training did not write. This module does not import megatron-core.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import pickle
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from slimrl.arguments.checkpoints import (
    MANIFEST_NAME,
    RELEASE,
    REPLACED,
    TRACKER_NAME,
    UNFINISHED,
    find_corruption,
    folder_name,
    is_ours,
    iteration_of,
    manifest,
    placed,
)
from slimrl.arguments.flags.checkpoint import CheckpointArguments
from slimrl.weights.checkpoint_checksums import CHECKSUMS_NAME, CheckedFolder, Checksums, checksums_text
from slimrl.weights.safe_pickle import load_plain

DATA_STATE_NAME = "data_state.pt"


@dataclasses.dataclass(frozen=True)
class CheckpointFolder:
    """One complete checkpoint; `iteration` is the last rollout trained on, None for a converted model."""

    path: Path
    iteration: int | None


def find_checkpoint(load_dir: str | Path | None, step: int | None = None) -> CheckpointFolder | None:
    """The checkpoint that the tracker file in `load_dir` names, or the one of iteration `step`.

    `load_dir` may also be a checkpoint's own folder. None if the folder is absent or has no tracker file. Raises
    FileNotFoundError if a named checkpoint does not exist, ValueError for an unreadable tracker file or an incomplete
    checkpoint.
    """
    if load_dir is None:
        return None
    root = Path(load_dir)
    if (root / "metadata.json").is_file():
        return _whole(root, iteration_of(root.name.removesuffix(REPLACED)))
    if step is None:
        tracker = root / TRACKER_NAME
        if not tracker.is_file():
            return None
        step = _parse_tracker(tracker)
    path = placed(root, folder_name(step))
    if path is None:
        raise FileNotFoundError(
            f"{root / folder_name(step)} does not exist: give the folder or the step of an existing checkpoint"
        )
    return _whole(path, step)


def _whole(path: Path, iteration: int | None) -> CheckpointFolder:
    if reason := find_corruption(path):
        raise ValueError(f"{path} is not loaded, {reason}: give another checkpoint's step or folder")
    return CheckpointFolder(path, iteration)


def _parse_tracker(tracker: Path) -> int | None:
    text = tracker.read_text().strip()
    if text == RELEASE:
        return None
    if not text.isdigit():
        raise ValueError(f"{tracker} says {text!r}: it must hold an iteration number or the word {RELEASE}")
    return int(text)


def begin(root: Path, iteration: int | None) -> Path:
    """An empty folder to write the checkpoint into; leftovers of killed runs in `root` are removed."""
    root.mkdir(parents=True, exist_ok=True)
    for left in sorted(root.iterdir()):
        name = left.name.removesuffix(UNFINISHED).removesuffix(REPLACED)
        if name == left.name or (name != RELEASE and iteration_of(name) is None):
            continue
        if left.name.endswith(REPLACED) and not (root / name).exists():
            left.rename(root / name)  # killed between the two renames
        else:
            shutil.rmtree(left)
    partial = partial_path(root, iteration)
    partial.mkdir()
    return partial


def partial_path(root: Path, iteration: int | None) -> Path:
    """The folder of a checkpoint while it is written."""
    return root / (folder_name(iteration) + UNFINISHED)


def write_checksums(partial: Path, known: Mapping[str, Checksums]) -> None:
    """Store the checksums of every file; those missing from `known` are computed from the files."""
    write_bytes(partial / CHECKSUMS_NAME, checksums_text(partial, known).encode())


def write_manifest(partial: Path, iteration: int, **more: Any) -> None:
    """Write the manifest of files and their lengths; the last file of a training checkpoint."""
    files = {path.name: path.stat().st_size for path in partial.iterdir()}
    write_bytes(partial / MANIFEST_NAME, manifest(iteration, files, **more).encode())


def commit(root: Path, iteration: int | None) -> Path:
    """Make the written checkpoint the newest one: rename its folder, then write the tracker file."""
    final, partial = root / folder_name(iteration), partial_path(root, iteration)
    sync_folder(partial)
    discarded = final.with_name(final.name + REPLACED)
    if replaces := final.exists():  # the same rollout trained again after a resume
        final.rename(discarded)  # this name is found too, if the process is killed here
    partial.rename(final)
    sync_folder(root)
    tracker = root / TRACKER_NAME
    fresh = tracker.with_name(TRACKER_NAME + UNFINISHED)
    write_bytes(fresh, (RELEASE if iteration is None else str(iteration)).encode())
    fresh.replace(tracker)
    sync_folder(root)
    if replaces:  # only after the renames are on disk
        shutil.rmtree(discarded)
    return final


def discard(root: Path, iteration: int | None) -> None:
    """Remove the files of a failed checkpoint, as far as possible."""
    shutil.rmtree(partial_path(root, iteration), ignore_errors=True)


def newest(root: Path) -> str:
    """Describes the newest complete checkpoint in `root`, for the error of a failed save."""
    try:
        found = find_checkpoint(root)
    except (OSError, ValueError) as error:
        return f"none is known to be whole ({error})"
    return "there is none yet" if found is None else f"{found.path} is whole"


def own_iterations(root: Path) -> list[int]:
    """The iterations of checkpoints in `root` that training wrote, ascending; not converted or foreign ones."""
    iterations = (iteration_of(path.name) for path in root.iterdir() if is_ours(path))
    return sorted(iteration for iteration in iterations if iteration is not None)


def remove(root: Path, iteration: int) -> None:
    """Delete a checkpoint; renames it first, so that a kill leaves no incomplete one under its name."""
    partial = partial_path(root, iteration)
    (root / folder_name(iteration)).rename(partial)
    sync_folder(root)
    shutil.rmtree(partial)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file durably (fsync). Raises OSError with the path, also for a full disk."""
    try:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable (fsync)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def encode_data_state(data_state: dict[str, Any]) -> bytes:
    """The data source's state as bytes for the file `data_state.pt`.

    Raises ValueError if it has more than plain data, instead of failing when the run is resumed.
    """
    buffer = io.BytesIO()
    torch.save(data_state, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"the data source's state is not plain data and could not be reloaded: {error}") from error
    return buffer.getvalue()


def write_data_state(folder: Path, encoded: bytes) -> None:
    """Store the encoded state in the checkpoint that is being written."""
    write_bytes(folder / DATA_STATE_NAME, encoded)


def read_data_state(folder: Path) -> dict[str, Any] | None:
    """The state of `write_data_state`, or None. Raises ValueError for a damaged or unsafe file."""
    path = folder / DATA_STATE_NAME
    if not path.is_file():
        return None
    if (checked := CheckedFolder.open(folder)) is not None:
        checked.check([DATA_STATE_NAME])
    return load_plain(path, path)


_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Retention:
    """Keeps the `newest` checkpoints, and those after a multiple of `interval` rollouts; both None: keeps all."""

    newest: int | None = None
    interval: int | None = None
    beside: tuple[Path, ...] = ()  # folders with further checkpoints of the same iterations, deleted with them

    @classmethod
    def from_args(cls, checkpoints: CheckpointArguments, *beside: Path) -> Retention:
        """The retention for the flags."""
        return cls(checkpoints.save_total_limit, checkpoints.save_retain_interval, beside)

    def surplus(self, iterations: Iterable[int], written: int) -> list[int]:
        """Those of `iterations` to delete once `written` is complete, ascending.

        Iterations above `written`, from an earlier run, stay until they are replaced one by one.
        """
        if self.newest is None and self.interval is None:
            return []
        older = sorted(iteration for iteration in set(iterations) if iteration < written)
        kept = (self.newest or 1) - 1
        return [i for i in older[: len(older) - kept] if self.interval is None or (i + 1) % self.interval != 0]

    def apply(self, root: Path, written: int) -> None:
        """Delete surplus checkpoints in `root` and `beside` it; logs folders that cannot be deleted."""
        if self.newest is None and self.interval is None:
            return
        for place in (root, *self.beside):
            for iteration in self.surplus(own_iterations(place), written):
                try:
                    remove(place, iteration)
                except OSError as error:
                    _logger.warning("an old checkpoint could not be deleted: %s", error)
