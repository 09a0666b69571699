"""A folder that appears atomically: written next to its final path, renamed at the end.

An interrupted run leaves nothing under the final name. An existing folder is replaced only on request, and only if it
has no files other than such outputs. Two runs cannot write the same folder at the same time, and free disk space is
checked before the work. As with `cp`, the kernel decides when the bytes reach the disk, because the output can be
created again from its source. Used by the converters.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import Path

from slimrl.weights.reshard import listed

_GIB = 1024**3


class AtomicDir:
    """A context manager; `partial` is the folder to write into while it is open."""

    def __init__(self, folder: Path, *, replace: Collection[str] = (), needed_bytes: int = 0) -> None:
        """`replace` are patterns ("model*.safetensors"): an existing folder with only such files is replaced.

        `needed_bytes` must be free on its disk. Raises FileExistsError or NotADirectoryError if the path is occupied,
        ValueError for other files in a folder to replace, a mount point, or too little disk space.
        """
        self.folder = _real(folder)
        self.partial = partial_path(self.folder)
        self._lock: int | None = None
        self._replace = replace
        self._check_free()
        check_space(self.folder, needed_bytes)

    def __enter__(self) -> AtomicDir:
        self.open()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        if exc_type is None:
            self.commit()
        else:
            self.discard()

    def open(self) -> None:
        """Creates the empty partial folder. Raises FileExistsError if another process is writing it."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if self.partial.exists():  # from a killed run, or from one that still runs
            self._take_lock()
            shutil.rmtree(self.partial)
            self._release_lock()
        self.partial.mkdir()
        self._take_lock()

    def commit(self) -> None:
        """Renames the folder to its final path. Raises FileExistsError if that path was created meanwhile."""
        try:
            self._check_free()
            if self.folder.exists():
                self._put_in_place_of_old()
            else:
                self.partial.rename(self.folder)
        except (OSError, ValueError):
            self.discard()
            raise
        self._release_lock()

    def _put_in_place_of_old(self) -> None:
        discarded = self.partial.with_suffix(".replaced")
        shutil.rmtree(discarded, ignore_errors=True)
        self.folder.rename(discarded)
        try:
            self.partial.rename(self.folder)
        except OSError:
            discarded.rename(self.folder)
            raise
        shutil.rmtree(discarded)

    def discard(self) -> None:
        """Removes what was written."""
        shutil.rmtree(self.partial, ignore_errors=True)
        self._release_lock()

    def _check_free(self) -> None:
        if not self.folder.exists():
            return
        if not self.folder.is_dir():
            raise NotADirectoryError(f"{self.folder} is a file: choose another folder")
        if self.folder.is_mount():
            raise ValueError(f"{self.folder} is a mount point, which cannot be a rename target: choose a folder in it")
        held = sorted(path.name for path in self.folder.iterdir())
        if held and not self._replace:
            raise FileExistsError(f"{self.folder} exists already and is not empty: choose another folder or remove it")
        if foreign := [name for name in held if not any(fnmatch(name, pattern) for pattern in self._replace)]:
            raise ValueError(
                f"{self.folder} is not replaced, because it also has {listed(foreign)}, which would be lost: choose"
                " another folder, or move these files"
            )

    def _take_lock(self) -> None:
        self._lock = os.open(self.partial, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._release_lock()
            raise FileExistsError(
                f"{self.folder} is being written by another process: wait for it, or choose another folder"
            ) from error
        except OSError as error:
            # some network file systems have no locks; then the user must avoid two concurrent runs
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise

    def _release_lock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def partial_path(folder: Path) -> Path:
    """Path of `folder` while it is written."""
    folder = _real(folder)
    return folder.with_name(f".{folder.name}.partial")


def _real(folder: Path) -> Path:
    """The resolved path of `folder`: a link stays, and its target is written."""
    return Path(folder).resolve()


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raises ValueError if the disk of `folder` has fewer than `needed_bytes` free."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise ValueError(
            f"{folder} needs {needed_bytes / _GIB:.2f} GiB and its disk has {free / _GIB:.2f} GiB free:"
            " free some space or choose another folder"
        )


def check_apart(written: Path, flag: str, read: Path, read_flag: str) -> None:
    """Raises ValueError if writing the one folder would remove the other."""
    target, source = Path(written).resolve(), Path(read).resolve()
    if target == source or target in source.parents:
        raise ValueError(f"{flag} {written} contains {read_flag} {read}, which would be lost: choose another {flag}")
