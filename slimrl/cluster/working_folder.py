"""Actors stand where the driver stands: relative paths in flags, and modules of hooks, are meant from there."""

from __future__ import annotations

import os
from pathlib import Path


def enter(folder: Path) -> None:
    """Changes into the driver's folder; Ray leaves actors where it was started itself.

    On a node that has no such folder nothing changes: absolute paths are the only ones that can work there.
    """
    if folder.is_dir():
        os.chdir(folder)
