"""Where checkpoints lie on disk, and how a torn one is never mistaken for a whole one.

`<dir>/latest_checkpointed_iteration.txt` names the newest complete checkpoint: a number k for the folder
`iter_000000k`, or `release` for a model converted from elsewhere. A checkpoint is written under `<name>.tmp`,
then renamed, and only then named in the tracker file. No megatron-core here.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch

TRACKER_NAME = "latest_checkpointed_iteration.txt"
DATA_STATE_NAME = "data_state.pt"
RELEASE = "release"


@dataclasses.dataclass(frozen=True)
class CheckpointFolder:
    """One complete checkpoint; `iteration` is the last rollout trained on, None for a converted model."""

    path: Path
    iteration: int | None


def folder_name(iteration: int | None) -> str:
    """`iter_0000012` for 12, `release` for None."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def find_checkpoint(load_dir: str | Path | None, step: int | None = None) -> CheckpointFolder | None:
    """The checkpoint that the tracker file in `load_dir` names, or the one of iteration `step`.

    `load_dir` may also be a checkpoint's own folder. None where the folder is absent or holds no tracker file.
    Raises FileNotFoundError where a named checkpoint is not there, ValueError for an unreadable tracker file.
    """
    if load_dir is None:
        return None
    root = Path(load_dir)
    own_iteration = _iteration_of(root.name)
    if (root / "metadata.json").is_file():
        return CheckpointFolder(root, own_iteration)
    if step is None:
        tracker = root / TRACKER_NAME
        if not tracker.is_file():
            return None
        step = _parse_tracker(tracker)
    path = root / folder_name(step)
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} does not exist, although {root} should hold that checkpoint: give the folder or the step of"
            " one that exists"
        )
    return CheckpointFolder(path, step)


def _iteration_of(name: str) -> int | None:
    return int(name[5:]) if name.startswith("iter_") and name[5:].isdigit() else None


def _parse_tracker(tracker: Path) -> int | None:
    text = tracker.read_text().strip()
    if text == RELEASE:
        return None
    if not text.isdigit():
        raise ValueError(f"{tracker} says {text!r}: it must hold an iteration number or the word {RELEASE}")
    return int(text)


def begin(root: Path, iteration: int | None) -> Path:
    """An empty folder to write the checkpoint into; what a crashed run left there is removed."""
    partial = partial_path(root, iteration)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def partial_path(root: Path, iteration: int | None) -> Path:
    """The folder a checkpoint has while it is written."""
    return root / (folder_name(iteration) + ".tmp")


def commit(root: Path, iteration: int | None) -> Path:
    """Make the written checkpoint the newest one: rename its folder, then write the tracker file."""
    final = root / folder_name(iteration)
    if final.exists():  # the same rollout trained again after a resume
        discarded = final.with_name(final.name + ".old")
        shutil.rmtree(discarded, ignore_errors=True)
        final.rename(discarded)
        partial_path(root, iteration).rename(final)
        shutil.rmtree(discarded)
    else:
        partial_path(root, iteration).rename(final)
    _sync_folder(root)
    tracker = root / TRACKER_NAME
    fresh = tracker.with_name(TRACKER_NAME + ".tmp")
    with fresh.open("w") as file:
        file.write(RELEASE if iteration is None else str(iteration))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(tracker)
    _sync_folder(root)
    return final


def _sync_folder(folder: Path) -> None:
    """Have renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def encode_data_state(data_state: dict[str, Any]) -> bytes:
    """Where the data source stands, as bytes for `write_data_state`.

    Raises ValueError where it holds more than plain data: now, not when the run is resumed.
    """
    buffer = io.BytesIO()
    torch.save(data_state, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"the data source's state is not plain data and could not be loaded again: {error}") from error
    return buffer.getvalue()


def write_data_state(folder: Path, encoded: bytes) -> None:
    """Store the encoded state in the checkpoint that is being written."""
    with (folder / DATA_STATE_NAME).open("wb") as file:
        file.write(encoded)
        file.flush()
        os.fsync(file.fileno())


def read_data_state(folder: Path) -> dict[str, Any] | None:
    """What `write_data_state` stored, None where nothing was."""
    path = folder / DATA_STATE_NAME
    return torch.load(path, weights_only=True) if path.is_file() else None
