"""One log file per actor process: everything it writes, also from C++ and from a crash, in order."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from collections import deque
from pathlib import Path

from slimrl.processes.optional_files import optional_output

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def redirect_to(path: Path, level: str) -> None:
    """Sends this process's stdout, stderr, log records and fatal-signal tracebacks to `path` (appending)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a", buffering=1)  # noqa: SIM115 - lives as long as the process
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    faulthandler.enable(file=sys.__stderr__)
    # whoever prints, a reward function of the user's, say, is not ended by a full disk
    sys.stdout, sys.stderr = optional_output(1), optional_output(2)
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format=LOG_FORMAT, force=True)


def last_lines(path: Path, count: int = 20) -> str:
    """The last `count` lines of a log, or a sentence saying why there are none."""
    try:
        with open(path, errors="replace") as file:
            lines = "".join(deque(file, maxlen=count)).rstrip()
    except OSError as error:
        return f"(no log can be read: {error})"
    return lines or f"({path} is empty)"
