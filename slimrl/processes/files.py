"""Files and folders that appear atomically, that a run can do without, or that belong to one run or one user.

An atomic file or folder is written under a temporary name beside its final path and then renamed; an interrupted run
leaves nothing under the final name. `AtomicDir` replaces an existing folder only on request, and only if it has no
files other than such outputs. Two runs cannot write the same folder at the same time, and free disk space is checked
before the work. As with `cp`, the kernel decides when the bytes reach the disk, because the output can be created again
from its source; checkpoints, which cannot, are written elsewhere.

An optional file (logs, summaries, charts, dumps) fails on a full disk with one warning, and the run continues; one line
tells when it works again.

`only_run_in` locks a folder for one run: the driver locks `--save`, where two runs would delete each other's unfinished
checkpoints. The kernel releases the lock with its process, however that ends; the file alone does not lock. On a
network file system the lock of a dead machine stays until its lease expires (NFSv4: a minute or two; NFSv3: until the
machine is back); the error names the file. `make_private` is for folders with predictable names (in /tmp).
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import io
import json
import logging
import os
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

logger = logging.getLogger("slimrl")

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # errors of file systems without locks
LISTED_NAMES = 5  # names listed in a message; the others are counted


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path, which replaces `path` if the block succeeds and is removed otherwise.

    Creates the folder. Readers see either the old or the new file. Does not fsync.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield unfinished
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()  # a partial file would take up disk space
        raise


class OptionalFiles:
    """The files of one kind; not thread-safe."""

    def __init__(self, what: str) -> None:
        """`what` is the subject of log lines, such as "the summary runs/a/summary.json"."""
        self._what = what
        self._failing = False

    @property
    def failing(self) -> bool:
        """Whether the last attempt failed."""
        return self._failing

    def attempt(self, write: Callable[[], object]) -> bool:
        """Calls `write` and returns whether it succeeded; logs the first OSError of consecutive ones."""
        try:
            write()
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "cannot write %s; the run continues without it and retries at the next write: %s",
                    self._what,
                    error,
                )
            self._failing = True
            return False
        if self._failing:
            logger.warning("writing %s works again", self._what)
            self._failing = False
        return True


class OptionalOutput(io.FileIO):
    """A process's output to a file: on a full disk output is lost, without an error for the code that prints."""

    def write(self, data: object) -> int:
        """Writes `data` if possible; returns its length in any case."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        try:
            return super().write(view) or 0
        except OSError:
            return len(view)


def optional_output(descriptor: int) -> io.TextIOWrapper:
    """A line-buffered text stream to an open file descriptor; closing it leaves the descriptor open."""
    raw = OptionalOutput(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)


class OptionalLogHandler(logging.FileHandler):
    """A log file; on a full disk lines are lost, with one warning instead of a traceback for each."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, encoding="utf-8")
        self._failing = False

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record; logs when writing works again after a failure."""
        self._failed = False
        super().emit(record)
        if self._failing and not self._failed:
            self._failing = False
            logger.warning("writing the log %s works again", self.baseFilename)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Logs the first of consecutive failures."""
        self._failed = True
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failing:
            self._failing = True
            logger.warning("cannot write the log %s; the run continues without it: %s", self.baseFilename, error)

    def close(self) -> None:
        """Closes the file; on a full disk buffered lines are lost."""
        try:
            super().close()
        except OSError:
            self.stream = None


_GIB = 1024**3


class AtomicDir:
    """A context manager; `partial` is the folder to write into while it is open."""

    def __init__(self, folder: Path, *, replace: Collection[str] = (), needed_bytes: int = 0) -> None:
        """`replace` are patterns ("model*.safetensors"): an existing folder with only such files is replaced.

        `needed_bytes` must be free on its disk. Raises FileExistsError or NotADirectoryError if the path is occupied,
        ValueError for other files in a folder to replace, a mount point, or too little disk space.
        """
        self.folder = _real(folder)
        self.partial = partial_path(self.folder)
        self._lock: int | None = None
        self._replace = replace
        self._check_free()
        check_space(self.folder, needed_bytes)

    def __enter__(self) -> AtomicDir:
        self.open()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        if exc_type is None:
            self.commit()
        else:
            self.discard()

    def open(self) -> None:
        """Creates the empty partial folder. Raises FileExistsError if another process is writing it."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if self.partial.exists():  # from a killed run, or from one that still runs
            self._take_lock()
            shutil.rmtree(self.partial)
            self._release_lock()
        self.partial.mkdir()
        self._take_lock()

    def commit(self) -> None:
        """Renames the folder to its final path. Raises FileExistsError if that path was created meanwhile."""
        try:
            self._check_free()
            if self.folder.exists():
                self._put_in_place_of_old()
            else:
                self.partial.rename(self.folder)
        except (OSError, ValueError):
            self.discard()
            raise
        self._release_lock()

    def _put_in_place_of_old(self) -> None:
        discarded = self.partial.with_suffix(".replaced")
        shutil.rmtree(discarded, ignore_errors=True)
        self.folder.rename(discarded)
        try:
            self.partial.rename(self.folder)
        except OSError:
            discarded.rename(self.folder)
            raise
        shutil.rmtree(discarded)

    def discard(self) -> None:
        """Removes what was written."""
        shutil.rmtree(self.partial, ignore_errors=True)
        self._release_lock()

    def _check_free(self) -> None:
        if not self.folder.exists():
            return
        if not self.folder.is_dir():
            raise NotADirectoryError(f"{self.folder} is a file: choose another folder")
        if self.folder.is_mount():
            raise ValueError(f"{self.folder} is a mount point, which cannot be a rename target: choose a folder in it")
        held = sorted(path.name for path in self.folder.iterdir())
        if held and not self._replace:
            raise FileExistsError(f"{self.folder} exists already and is not empty: choose another folder or remove it")
        if foreign := [name for name in held if not any(fnmatch(name, pattern) for pattern in self._replace)]:
            raise ValueError(
                f"{self.folder} is not replaced, because it also has {listed(foreign)}, which would be lost: choose"
                " another folder, or move these files"
            )

    def _take_lock(self) -> None:
        self._lock = os.open(self.partial, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._release_lock()
            raise FileExistsError(
                f"{self.folder} is being written by another process: wait for it, or choose another folder"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # without locks the user must avoid two concurrent runs
                raise

    def _release_lock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def partial_path(folder: Path) -> Path:
    """Path of `folder` while it is written."""
    folder = _real(folder)
    return folder.with_name(f".{folder.name}.partial")


def _real(folder: Path) -> Path:
    """The resolved path of `folder`: a link stays, and its target is written."""
    return Path(folder).resolve()


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raises ValueError if the disk of `folder` has fewer than `needed_bytes` free."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise ValueError(
            f"{folder} needs {needed_bytes / _GIB:.2f} GiB and its disk has {free / _GIB:.2f} GiB free:"
            " free some space or choose another folder"
        )


def check_apart(written: Path, flag: str, read: Path, read_flag: str) -> None:
    """Raises ValueError if writing the one folder would remove the other."""
    target, source = Path(written).resolve(), Path(read).resolve()
    if target == source or target in source.parents:
        raise ValueError(f"{flag} {written} contains {read_flag} {read}, which would be lost: choose another {flag}")


def listed(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - LISTED_NAMES} more" if len(ordered) > LISTED_NAMES else ""
    return ", ".join(ordered[:LISTED_NAMES]) + more


LOCK_NAME = ".slimrl_run.lock"  # hidden: a folder with only this file counts as empty


class FolderInUseError(RuntimeError):
    """Another running run writes to the folder, or the folder is not writable."""


@contextlib.contextmanager
def only_run_in(folder: str | Path, *, flag: str, name: str) -> Iterator[None]:
    """Holds the lock of `folder`, which is created if absent, for the length of the block.

    `name` is this run's name, for the error of a second run. Raises FolderInUseError, which names `flag`. On a file
    system without locks it only logs a warning.
    """
    path = Path(folder) / LOCK_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path, flag)
    except OSError as error:
        raise FolderInUseError(f"{flag} {folder} cannot be written: {error}: choose another folder") from error
    try:
        about = {"host": socket.gethostname(), "pid": os.getpid(), "since": _now(), "run": name}
        with contextlib.suppress(OSError):  # a full disk: the lock holds without its text
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(about).encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()  # before releasing the lock, or it could be the next holder's file
        os.close(descriptor)


def _locked(path: Path, flag: str) -> int:
    """Opens and locks the file at `path`; returns its descriptor."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(path, descriptor):
                return descriptor
        except BlockingIOError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise FolderInUseError(
                f"{flag} {path.parent} is used by another run{holder}: two runs would delete each other's unfinished"
                f" checkpoints; wait for its end, end it, or give another {flag}; if its machine is gone for good,"
                f" remove {path}"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            logger.warning(
                "the file system of %s %s has no locks (%s): make sure that no other run writes there",
                flag,
                path.parent,
                error.strerror,
            )
            return descriptor
        os.close(descriptor)  # its holder has just removed it: retry with the current file


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    """` (run r, process 12 on host h, since ...)` from the lock file; "" if it is unreadable."""
    try:
        about = json.loads(os.pread(descriptor, 4096, 0))
        return f" (run {about['run']}, process {about['pid']} on {about['host']}, since {about['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class NotPrivateError(OSError):
    """The path exists, and another user owns it or can write to it."""


def make_private(path: Path) -> Path:
    """The folder `path` with mode 0700, created if absent. Raises NotPrivateError or another OSError."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise NotPrivateError(f"{path} is not a folder that this user can open: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise NotPrivateError(f"{path} belongs to user {status.st_uid}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise NotPrivateError(f"{path} can be written to by others (mode {stat.S_IMODE(status.st_mode):o})")
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return path
