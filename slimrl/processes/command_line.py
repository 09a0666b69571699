"""Keeps secrets of the command line out of what others see: the process list, logs, and records of the command.

Called once, by the entry point, before anything reads `sys.argv` or starts a process.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence


def show_as(words: Sequence[str]) -> None:
    """Puts `words` in place of `sys.argv`, and of the command in the process list.

    The process list is left alone where they are the same: a title that is set once is cut to the room of the first.
    """
    if list(words) == sys.argv:
        return
    from setproctitle import setproctitle

    sys.argv[:] = words
    setproctitle(shlex.join([sys.executable, *words]))
