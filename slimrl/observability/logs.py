"""Where log lines go: short ones to the terminal, complete ones to a file of the run.

`setup_logging` is called once, by an entry point; everything else only asks for `logging.getLogger("slimrl")`.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from slimrl.processes.optional_files import OptionalLogHandler

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

# Attribute of a record (`logger.info(..., extra={SHORT: text})`) that the terminal shows instead of the message.
SHORT = "short"
# What a terminal of 100 columns has left beside the time of day.
TERMINAL_WIDTH = 100 - len("12:34:56 ")


class _TerminalFormatter(logging.Formatter):
    """`12:34:56 message`, with the level where it is worth a look; the record's `short` form where it has one."""

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

    Called again it replaces what it had set up. Returns the file's path. Raises ValueError on an unknown level.
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
