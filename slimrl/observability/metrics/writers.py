"""Metric writers: the protocol that the run log calls (`MetricWriter`), TensorBoard and W&B. Prometheus is in
`prometheus`.

Every value is written with its axis (`metrics.axis_of`).

W&B runs in a thread of the driver, so that the service can neither delay nor end training. Its first failure is logged
with what to do about it and ends the writing; training continues. That thread imports `wandb`, only with `--use-wandb`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from slimrl.arguments import Arguments
from slimrl.arguments.redact import redact
from slimrl.observability.metrics import AXES
from slimrl.processes.files import OptionalFiles

if TYPE_CHECKING:
    import wandb


logger = logging.getLogger("slimrl")

FLUSH_S = 10
EVENT_FILE_VERSION = "brain.Event:2"
INIT_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 30.0  # what is not sent by then stays on disk, for `wandb sync`
# maximum wait at the end of the run: for an open W&B run, and for one that is not open yet
GIVE_UP_AFTER_S = FINISH_TIMEOUT_S + 10.0
LATE_START_S = 10.0
DEFAULT_PROJECT = "slimrl"


@dataclasses.dataclass(frozen=True)
class WandbSettings:
    """The identity of a W&B run; None leaves a field to the package's environment variables and files."""

    id: str
    mode: Literal["online", "offline"] | None
    folder: Path
    project: str
    name: str
    group: str | None
    team: str | None
    host: str | None
    key: str | None = dataclasses.field(repr=False)
    config: dict[str, Any] = dataclasses.field(repr=False)

    @classmethod
    def from_args(cls, args: Arguments, earlier_id: str | None) -> WandbSettings | None:
        """None if W&B is not used. `earlier_id` is the run in this folder's summary, if it continues."""
        if not args.use_wandb or args.wandb_mode == "disabled":
            return None
        run_id = args.wandb_run_id or earlier_id or secrets.token_hex(4)
        group = args.wandb_group
        if group is not None and args.wandb_random_suffix:
            group = f"{group}_{run_id}"
        return cls(
            id=run_id,
            mode=cast('Literal["online", "offline"] | None', args.wandb_mode),
            folder=Path(args.wandb_dir or args.run_dir),
            project=args.wandb_project or DEFAULT_PROJECT,
            name=group or Path(args.run_dir).name,
            group=group,
            team=args.wandb_team,
            host=args.wandb_host,
            key=args.wandb_key,
            config=_config(dataclasses.asdict(args)),
        )


class WandbRun:
    """Implements `charts.MetricWriter`."""

    def __init__(self, settings: WandbSettings) -> None:
        self._settings = settings
        self._rows: queue.SimpleQueue[dict[str, float] | None] = queue.SimpleQueue()
        self._failed = threading.Event()
        self._opened = threading.Event()
        self._exit_code = 0
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)

    def begin(self, starts: Mapping[str, int]) -> None:
        """Opens the run, or continues it, in the background."""
        self._thread.start()

    def add(self, axis: str, number: int, values: Mapping[str, float]) -> None:
        """One row: the values and their axis."""
        if not self._failed.is_set():
            self._rows.put({**values, axis: number})

    def close(self, *, failed: bool) -> None:
        """Waits until everything is written and sent, but for `GIVE_UP_AFTER_S` seconds at most."""
        if not self._thread.is_alive():
            return
        self._exit_code = int(failed)
        self._rows.put(None)
        self._opened.wait(LATE_START_S)
        self._thread.join(GIVE_UP_AFTER_S if self._opened.is_set() else 0.0)
        if self._thread.is_alive():
            self._give_up("it did not finish in time")

    def _work(self) -> None:
        try:
            run = _open(self._settings)
            self._opened.set()
            logger.info("W&B: run %s, %s", run.id, _where(run))
            while (row := self._rows.get()) is not None:
                run.log(row)
            run.finish(exit_code=self._exit_code)
        except BaseException as error:  # also SystemExit: a failing writer must not end the run
            self._give_up(f"{type(error).__name__}: {error}")
            self._opened.set()  # release the waiting threads

    def _give_up(self, why: str) -> None:
        if self._failed.is_set():
            return
        self._failed.set()
        logger.warning(
            "W&B logging stopped, training continues (%s): all numbers are in summary.json; what W&B has kept"
            " is in %s and is sent by `wandb sync`",
            why,
            self._settings.folder / "wandb",
        )


def _open(settings: WandbSettings) -> wandb.Run:
    import wandb

    settings.folder.mkdir(parents=True, exist_ok=True)
    given = {"mode": settings.mode, "base_url": settings.host, "api_key": settings.key}
    run = wandb.init(
        id=settings.id,
        resume="allow",
        project=settings.project,
        entity=settings.team,
        group=settings.group,
        name=settings.name,
        dir=settings.folder,
        config=settings.config,
        settings=wandb.Settings(
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
            finish_timeout_raises=True,
            login_timeout=1,  # do not prompt for a key on the terminal
            console="off",
            silent=True,
            **{name: value for name, value in given.items() if value is not None},
        ),
    )
    for axis in dict.fromkeys(AXES.values()):
        run.define_metric(axis)
    for prefix, axis in AXES.items():
        run.define_metric(f"{prefix}/*", step_metric=axis)
    return run


def _config(values: dict[str, Any]) -> dict[str, Any]:
    """The flags as plain data, without possible secrets."""
    del values["custom"]  # custom settings may contain API keys
    return redact(json.loads(json.dumps(values, default=str)))


def _where(run: wandb.Run) -> str:
    return f"kept for `wandb sync {Path(run.dir).parent}`" if run.offline else run.url


TRAIN_AXIS = "train/step"


class MetricWriter(Protocol):
    """A writer of scalars. One thread makes the calls, in this order."""

    def begin(self, starts: Mapping[str, int]) -> None:
        """Start or continue the run at these positions of its axes."""
        ...

    def add(self, axis: str, number: int, values: Mapping[str, float]) -> None:
        """Write scalars by their full names, at this position of their axis."""
        ...

    def close(self, *, failed: bool) -> None:
        """End the run."""
        ...


class EventFile:
    """A new event file of scalars in `folder`, which is created; without torch, whose import takes the driver a second.

    The records are those of torch's SummaryWriter. Raises ModuleNotFoundError without the package tensorboard.

    Points of earlier files in the folder at or after `first_step` are hidden: they are about to be repeated.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_S)
        begin = SessionLog(status=SessionLog.START)
        for event in (
            Event(step=first_step, file_version=EVENT_FILE_VERSION),
            Event(step=first_step, session_log=begin),
        ):
            event.wall_time = time.time()
            self._writer.add_event(event)

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Adds one point per name at `step`, in one record."""
        points = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=points)))

    def flush(self) -> None:
        """Writes what was added. Raises OSError if that fails."""
        self._writer.flush()

    def close(self) -> None:
        """Writes what was added and closes the file. Raises OSError if that fails."""
        self._writer.close()


class TensorBoard:
    """Event files in one folder, or, where axes count differently, those of train/ in a folder below it.

    TensorBoard hides points of an earlier process at or after the place where a folder continues, whatever their axis.
    """

    def __init__(self, folder: Path, *, axes_are_one: bool) -> None:
        """`axes_are_one`: all axes have the same positions."""
        self._folder = folder
        self._axes_are_one = axes_are_one
        self._writers: dict[Path, EventFile] = {}  # open ones
        self._files = OptionalFiles(f"TensorBoard's folder {folder}")

    def begin(self, starts: Mapping[str, int]) -> None:
        """Opens the files. Raises ModuleNotFoundError with the fix if tensorboard is missing."""
        for axis, first in starts.items():
            if axis in (TRAIN_AXIS, "rollout/step"):
                self._files.attempt(functools.partial(self._writer, axis, first))

    def add(self, axis: str, number: int, values: Mapping[str, float]) -> None:
        """Adds one point per name. If the disk is full, the points are lost."""

        def write() -> None:
            writer = self._writer(axis, number)
            writer.add_scalars(values, number)
            writer.flush()  # otherwise the writer's thread reports a failure, and loses points, much later

        if not self._files.attempt(write):
            self._drop()

    def close(self, *, failed: bool) -> None:
        """Writes the remaining points."""

        def close() -> None:
            for writer in self._writers.values():
                writer.close()

        if not self._files.attempt(close):
            self._drop()

    def _writer(self, axis: str, first_step: int) -> EventFile:
        """The open one of this axis; a writer that failed once is never whole again, so there may be a new one."""
        own_folder = axis == TRAIN_AXIS and not self._axes_are_one
        folder = self._folder / "train_steps" if own_folder else self._folder
        if folder not in self._writers:
            if self._files.failing:
                _probe(folder)  # the threads of a failing writer print long tracebacks
            self._writers[folder] = _open_writer(folder, first_step)
        return self._writers[folder]

    def _drop(self) -> None:
        for writer in self._writers.values():
            with contextlib.suppress(OSError):
                writer.close()
        self._writers = {}


def _probe(folder: Path) -> None:
    """Raises OSError if the folder is not writable."""
    probe = folder / f".{os.getpid()}.tmp"
    try:
        probe.write_bytes(bytes(1 << 16))
    finally:
        probe.unlink(missing_ok=True)


def _open_writer(folder: Path, first_step: int) -> EventFile:
    try:
        return EventFile(folder, first_step)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"--use-tensorboard needs the package tensorboard ({error}): pip install tensorboard, or leave the flag out"
        ) from error
