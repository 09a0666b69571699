"""A file that appears whole or not at all: written beside its place under a name of this process, then renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Gives the path to write to, which replaces `path` where the block ends without an error, and is removed else.

    Makes the folder. A reader sees the old file or the new one. The kernel decides when the bytes reach the disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield unfinished
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()  # a part of it would keep the room that others need
        raise
