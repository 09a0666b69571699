"""The folder of a run, which only its user may enter: prompts, answers, rewards and logs are in it.

Called by the entry points before anything is written there.
"""

from __future__ import annotations

import os
from pathlib import Path

PRIVATE = 0o700


def make_private(folder: Path) -> str | None:
    """Makes the folder, and takes every right from others; why that cannot be done, None where it was.

    What is above it gets the user's usual rights. Raises OSError where it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=PRIVATE, exist_ok=True)
    try:
        os.chmod(folder, PRIVATE)
    except OSError as error:  # it is another user's, or the file system knows no rights
        return f"others may be able to read the run's folder {folder}: {error.strerror}"
    return None
