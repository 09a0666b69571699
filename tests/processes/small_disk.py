"""Runs a function in a process with a private small disk: a tmpfs in its own mount namespace."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_RUN = "import sys, importlib; from pathlib import Path; getattr(importlib.import_module(sys.argv[1]), sys.argv[2])"


@functools.cache
def _can_mount() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    line = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /mnt"]
    return subprocess.run(line, capture_output=True, check=False).returncode == 0


def on_small_disk(function: Callable[[Path], None], folder: Path, kib: int) -> str:
    """Calls a module's function with `folder` on a disk of that size; returns its stderr."""
    if not _can_mount():
        pytest.skip("needs root and a kernel that lets it mount a tmpfs")
    folder.mkdir(exist_ok=True)
    script = f'mount -t tmpfs -o size={kib}k none "$1" && exec "$2" -c "$3" "$4" "$5" "$1"'
    call = f"{_RUN}(Path(sys.argv[3]))"
    words = ["sh", "-c", script, "sh", str(folder), sys.executable, call, function.__module__, function.__qualname__]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        ["unshare", "--mount", *words], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Fills the disk of `folder` completely inside the block."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert os.statvfs(folder).f_bavail == 0
    try:
        yield
    finally:
        filler.unlink()
