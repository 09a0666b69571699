"""Files of a run that are not checkpoints: atomic files and best-effort files.

An atomic file is written under a temporary name in the same folder and then renamed. A best-effort file (logs,
summaries, charts, dumps) fails on a full disk with one warning, and the run continues; one line tells when it works
again.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path


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


logger = logging.getLogger("slimrl")


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
