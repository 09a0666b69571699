"""Keeps secrets of the command line out of what others see: the process list, logs, and records of the command.

Called once, by the entry point, before anything reads `sys.argv` or starts a process.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Sequence

HIDDEN = "***"


def hide_values(flags: Collection[str]) -> None:
    """Puts `***` in place of these flags' values in `sys.argv` and in the process list.

    The process list is left alone where none is given: a title that is set once is cut to the room of the first.
    """
    hidden = without_values(sys.argv, flags)
    if hidden == sys.argv:
        return
    from setproctitle import setproctitle

    sys.argv[:] = hidden
    setproctitle(shlex.join([sys.executable, *hidden]))


def without_values(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """`words` with `***` for the values of `flags`, written `--flag value` or `--flag=value`."""
    hidden, previous = [], ""
    for word in words:
        name = word.partition("=")[0]
        if previous in flags:
            hidden.append(HIDDEN)
        elif name in flags and name != word:
            hidden.append(f"{name}={HIDDEN}")
        else:
            hidden.append(word)
        previous = word
    return hidden
