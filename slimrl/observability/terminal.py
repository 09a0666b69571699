"""Terminal output: log handlers, the short form of step and evaluation lines, progress bars, plots as text.

Log lines are short on the terminal and complete in the run's file. An entry point calls `setup_logging` once; all other
code uses `logging.getLogger("slimrl")`. Progress bars appear only on a terminal. `ByteBar`, used by the converters, is
thread-safe. `text_chart` draws a plot with braille dots for the line and a sign for single points.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from slimrl.processes.files import OptionalLogHandler

if TYPE_CHECKING:
    from tqdm import tqdm
if TYPE_CHECKING:
    pass

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

# Attribute of a record (`logger.info(..., extra={SHORT: text})`) that the terminal shows instead of the message.
SHORT = "short"
# Space for the message in 100 columns, after the time of day.
TERMINAL_WIDTH = 100 - len("12:34:56 ")


class _TerminalFormatter(logging.Formatter):
    """`12:34:56 message`, with the level from WARNING up; uses the record's `short` form if it has one."""

    def format(self, record: logging.LogRecord) -> str:
        line = vars(record).get(SHORT) or super().format(record)
        stamp = self.formatTime(record, "%H:%M:%S")
        level = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        return f"{stamp} {level}{line}"


class _TerminalHandler(logging.StreamHandler):
    """Writes above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        if not self.stream.isatty():
            super().emit(record)
            return
        from tqdm import tqdm

        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


def setup_logging(level: str, run_dir: str | Path) -> Path:
    """Send the records of logger "slimrl" from `level` up to stderr and to `<run_dir>/logs/main.log` (appending).

    A second call replaces the handlers of the first. Returns the file's path. Raises ValueError on an unknown level.
    """
    file = Path(run_dir) / "logs" / "main.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("slimrl")
    logger.setLevel(level.upper())
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    terminal = _TerminalHandler(sys.stderr)
    terminal.setFormatter(_TerminalFormatter("%(message)s"))
    complete = OptionalLogHandler(file)
    complete.setFormatter(logging.Formatter(LOG_FORMAT))
    logger.addHandler(terminal)
    logger.addHandler(complete)
    logger.propagate = False
    return file


class ProgressBar:
    """`with ProgressBar("generate") as bar: bar.update_to(done, total)`; shown on stderr until the block ends.

    `enabled` is False if the stream is not a terminal: nothing is shown, and callers can skip polling.
    """

    def __init__(self, title: str, *, unit: str = "sample", stream: TextIO | None = None) -> None:
        self._title = title
        self._unit = unit
        self._stream = sys.stderr if stream is None else stream
        self.enabled = self._stream.isatty()

    def __enter__(self) -> ProgressBar:
        if self.enabled:
            from tqdm import tqdm

            self._bar = tqdm(
                desc=self._title, unit=self._unit, file=self._stream, leave=False, dynamic_ncols=True, mininterval=0.2
            )
        return self

    def update_to(self, done: int, total: int) -> None:
        """Show `done` of `total`; either may change in both directions between calls. `total` 0: not known yet."""
        if not self.enabled:
            return
        self._bar.total = total or None
        self._bar.n = done
        with contextlib.suppress(OSError):  # the terminal is gone
            self._bar.refresh()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            with contextlib.suppress(OSError):
                self._bar.close()


class ByteBar:
    """A context manager; `start` has the signature that the converters call `on_start`."""

    def __init__(self, title: str, *, shown: bool = True) -> None:
        self._title = title
        # None: tqdm itself shows nothing if stderr is not a terminal
        self._disable = None if shown else True
        self._bar: tqdm | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> ByteBar:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def start(self, nbytes: int) -> Callable[[int], object]:
        """Shows the bar for `nbytes` in all; returns the function that moves it by a number of bytes."""
        from tqdm import tqdm

        self._bar = tqdm(desc=self._title, total=nbytes, unit="B", unit_scale=True, disable=self._disable)
        return self._move

    def _move(self, nbytes: int) -> None:
        with self._lock:
            assert self._bar is not None  # of `start`
            self._bar.update(nbytes)


_BETWEEN = " | "
_TOTAL = "total "  # the last of the phases' seconds
_PHASES = ("generate", "train", "update", "total")  # any of them may be the first
# Parts of a step's line by their first word, in the order of their removal; all others stay.
_LEFT_OUT = ("kl", "grad", "loss", "diff")
_CUT = "..."


def short_step(line: str, width: int = TERMINAL_WIDTH) -> str:
    """A line of `step_line` with two digits and the total seconds, shortened to `width`; warnings stay."""
    parts = []
    for part in line.split(_BETWEEN):
        first = part.split(" ", 1)[0]
        if first == "version":
            continue
        parts.append(part.rpartition(_TOTAL)[2] if first in _PHASES else _two_digits(part))
    for word in _LEFT_OUT:
        if len(_BETWEEN.join(parts)) > width:
            parts = [part for part in parts if not part.startswith(f"{word} ")]
    return _cut(_BETWEEN.join(parts), width)


def short_evaluation(line: str, width: int = TERMINAL_WIDTH) -> str:
    """An evaluation's line; if it is too long, without the parentheses after the scores."""
    if len(line) > width:
        line = _BETWEEN.join(part.partition(" (")[0] for part in line.split(_BETWEEN))
    return _cut(line, width)


def _two_digits(part: str) -> str:
    label, _, number = part.removeprefix("logprob ").rpartition(" ")
    return f"{label} {float(number):.2g}" if label in _LEFT_OUT else part


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - len(_CUT)] + _CUT


# Dot (column, row) of a braille cell -> bit of its code point (Unicode 11.0, chapter 21.1).
_BRAILLE_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE_BLANK = 0x2800
_LABEL_WIDTH = 7
Points = Sequence[tuple[float, float]]


def text_chart(line: Points, marks: Points = (), *, width: int = 70, height: int = 14, mark: str = "◆") -> str:
    """`line` as a connected curve with `marks` on top, in `height` rows of at most `width` characters plus the axes.

    Empty if there are no points.
    """
    points = [*line, *marks]
    if not points:
        return ""
    left, right = _range([x for x, _ in points])
    low, high = _range([y for _, y in points])
    columns, rows = (width - _LABEL_WIDTH - 2) * 2, height * 4

    def dot(x: float, y: float) -> tuple[int, int]:
        return round((x - left) / (right - left) * (columns - 1)), round((high - y) / (high - low) * (rows - 1))

    cells = [[0] * (columns // 2) for _ in range(height)]
    dots = [dot(x, y) for x, y in line]
    for start, end in zip(dots, dots[1:] or dots, strict=False):
        for column, row in _between(start, end):
            cells[row // 4][column // 2] |= _BRAILLE_BITS[column % 2][row % 4]
    canvas = [[chr(_BRAILLE_BLANK + bits) if bits else " " for bits in row] for row in cells]
    for x, y in marks:
        column, row = dot(x, y)
        canvas[row // 4][column // 2] = mark

    middle = height // 2
    labels = {0: high, middle: high - (high - low) * (middle * 4 + 2) / rows, height - 1: low}
    text = []
    for row, characters in enumerate(canvas):
        label, axis = (_label(labels[row]), "┤") if row in labels else ("", "│")
        text.append(f"{label:>{_LABEL_WIDTH}} {axis}{''.join(characters)}")
    indent = " " * (_LABEL_WIDTH + 1)
    first, last = f"{left:g}", f"{right:g}"
    text.append(f"{indent}└{'─' * (columns // 2)}")
    text.append(f"{indent} {first}{last:>{columns // 2 - len(first)}}")
    return "\n".join(row.rstrip() for row in text)


def _range(values: list[float]) -> tuple[float, float]:
    """Lowest and highest value, widened if they are equal."""
    low, high = min(values), max(values)
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Dots of the straight line, both ends included."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (round(start[0] + (end[0] - start[0]) * i / steps), round(start[1] + (end[1] - start[1]) * i / steps))
        for i in range(steps + 1)
    ]


def _label(value: float) -> str:
    return f"{value:.3g}"
