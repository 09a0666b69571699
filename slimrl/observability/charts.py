"""Where scalars go besides the summary: what the run log asks of such a place, and TensorBoard.

The other places are `wandb_run` and `prometheus`. Whoever is told a number is told its axis too (`metrics.axis_of`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

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
        self._writers: dict[str, SummaryWriter] = {}

    def begin(self, starts: Mapping[str, int]) -> None:
        """Opens the files; raises ModuleNotFoundError with a sentence where tensorboard is missing."""
        first = starts["rollout/step"]
        own = _open_writer(self._folder, first)
        self._writers = dict.fromkeys(starts, own)
        if not self._axes_are_one:
            self._writers[TRAIN_AXIS] = _open_writer(self._folder / "train_steps", starts[TRAIN_AXIS])

    def add(self, axis: str, number: int, values: Mapping[str, float]) -> None:
        """One point per name."""
        for name, value in values.items():
            self._writers[axis].add_scalar(name, value, number)

    def close(self, *, failed: bool) -> None:
        """Writes what is left."""
        for writer in set(self._writers.values()):
            writer.close()


def finite_or_nan(value: float | None) -> float:
    """A number for places that know NaN but no missing ones."""
    return math.nan if value is None else float(value)


def _open_writer(folder: Path, first_step: int) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"--use-tensorboard needs the package tensorboard ({error}): pip install tensorboard, or leave the flag out"
        ) from error
    # TensorBoard hides points of an earlier process at or after purge_step: they are about to be repeated.
    return SummaryWriter(str(folder), purge_step=first_step, flush_secs=10)
