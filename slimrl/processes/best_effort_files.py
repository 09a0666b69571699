"""Files that a run can do without for a while: a disk that is full costs a warning, and not the run.

Promises one warning when writing begins to fail and one sentence when it works again, whatever is written in between.
Called by whoever writes logs, summaries, charts and dumps; checkpoints are no such files.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable

logger = logging.getLogger("slimrl")


class OptionalFiles:
    """The files of one kind; not to be shared by threads."""

    def __init__(self, what: str) -> None:
        """`what` begins the sentences, such as "the summary runs/a/summary.json"."""
        self._what = what
        self._failing = False

    @property
    def failing(self) -> bool:
        """Whether the last attempt failed."""
        return self._failing

    def attempt(self, write: Callable[[], object]) -> bool:
        """Whether `write` went through; an OSError of it is told once, until it works again."""
        try:
            write()
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "%s cannot be written, and the run continues without: %s; it is tried again each time",
                    self._what,
                    error,
                )
            self._failing = True
            return False
        if self._failing:
            logger.warning("%s can be written again", self._what)
            self._failing = False
        return True


class OptionalOutput(io.FileIO):
    """A process' output into a file: what has no room is lost, and whoever prints does not learn of it."""

    def write(self, data: object) -> int:
        """The bytes of `data`, written or not."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        try:
            return super().write(view) or 0
        except OSError:
            return len(view)


def optional_output(descriptor: int) -> io.TextIOWrapper:
    """A text stream to an open file, line by line; closing it leaves the file open."""
    raw = OptionalOutput(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)


class OptionalLogHandler(logging.FileHandler):
    """A log file; lines that have no room are lost, with one word on stderr instead of a traceback for each."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, encoding="utf-8")
        self._failing = False

    def emit(self, record: logging.LogRecord) -> None:
        """As ever, but for a disk that is full."""
        self._failed = False
        super().emit(record)
        if self._failing and not self._failed:
            self._failing = False
            logger.warning("the log %s can be written again", self.baseFilename)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Once for a row of failures."""
        self._failed = True
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failing:
            self._failing = True
            logger.warning("the log %s cannot be written, and the run continues without: %s", self.baseFilename, error)

    def close(self) -> None:
        """Whatever is left and has no room is lost."""
        try:
            super().close()
        except OSError:
            self.stream = None
