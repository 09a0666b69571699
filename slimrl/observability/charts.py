"""Where scalars go besides the summary: what the run log asks of such a place, and TensorBoard.

The other places are `wandb_run` and `prometheus`. Whoever is told a number is told its axis too (`metrics.axis_of`).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slimrl.processes.optional_files import OptionalFiles

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

TRAIN_AXIS = "train/step"


class Charts(Protocol):
    """A place for scalars. Its calls come from one thread and in this order."""

    def begin(self, starts: Mapping[str, int]) -> None:
        """The run starts or goes on at these places of its axes."""
        ...

    def add(self, axis: str, number: int, values: Mapping[str, float]) -> None:
        """Scalars by their full names, at this place of their axis."""
        ...

    def close(self, *, failed: bool) -> None:
        """The run is over."""
        ...


class TensorBoard:
    """Event files in one folder, or, where axes count differently, those of train/ in a folder below it.

    TensorBoard hides points of an earlier process at or after the place where a folder goes on, whatever their axis.
    """

    def __init__(self, folder: Path, *, axes_are_one: bool) -> None:
        """`axes_are_one` where all axes count the same."""
        self._folder = folder
        self._axes_are_one = axes_are_one
        self._writers: dict[Path, SummaryWriter] = {}  # open ones
        self._files = OptionalFiles(f"TensorBoard's folder {folder}")

    def begin(self, starts: Mapping[str, int]) -> None:
        """Opens the files; raises ModuleNotFoundError with a sentence where tensorboard is missing."""
        for axis, first in starts.items():
            if axis in (TRAIN_AXIS, "rollout/step"):
                self._files.attempt(lambda axis=axis, first=first: self._writer(axis, first))

    def add(self, axis: str, number: int, values: Mapping[str, float]) -> None:
        """One point per name. Points that the disk has no room for are missing from the charts."""

        def write() -> None:
            writer = self._writer(axis, number)
            for name, value in values.items():
                writer.add_scalar(name, value, number)
            if self._files.failing:
                writer.flush()  # a writer's own thread writes, and would tell of a failure much later

        if not self._files.attempt(write):
            self._drop()

    def close(self, *, failed: bool) -> None:
        """Writes what is left."""
        if not self._files.attempt(lambda: [writer.close() for writer in self._writers.values()]):
            self._drop()

    def _writer(self, axis: str, first_step: int) -> SummaryWriter:
        """The open one of this axis; a writer that failed once is never whole again, so there may be a new one."""
        own_folder = axis == TRAIN_AXIS and not self._axes_are_one
        folder = self._folder / "train_steps" if own_folder else self._folder
        if folder not in self._writers:
            if self._files.failing:
                _probe(folder)  # the threads of a writer that fails print more than anybody wants to read
            self._writers[folder] = _open_writer(folder, first_step)
        return self._writers[folder]

    def _drop(self) -> None:
        for writer in self._writers.values():
            with contextlib.suppress(OSError):
                writer.close()
        self._writers = {}


def finite_or_nan(value: float | None) -> float:
    """A number for places that know NaN but no missing ones."""
    return math.nan if value is None else float(value)


def _probe(folder: Path) -> None:
    """Raises OSError where nothing can be written."""
    probe = folder / f".{os.getpid()}.tmp"
    try:
        probe.write_bytes(bytes(1 << 16))
    finally:
        probe.unlink(missing_ok=True)


def _open_writer(folder: Path, first_step: int) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"--use-tensorboard needs the package tensorboard ({error}): pip install tensorboard, or leave the flag out"
        ) from error
    # TensorBoard hides points of an earlier process at or after purge_step: they are about to be repeated.
    return SummaryWriter(str(folder), purge_step=first_step, flush_secs=10)
