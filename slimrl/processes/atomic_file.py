"""Atomic file writes: write to a temporary file in the same folder, then rename it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
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
