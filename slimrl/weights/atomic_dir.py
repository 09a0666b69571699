"""A folder that appears whole or not at all: written beside its final place, renamed at the end.

Promises that an interrupted run leaves nothing under the final name, that what exists is never replaced unasked, that
a folder to replace loses no file that is not such an output's, that two runs do not write the same folder at once, and
that a full disk is noticed before the work. As with `cp`, the kernel decides when the bytes reach the disk: what is
written here can be made again from its source. Called by the converters.
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
        """`replace` are patterns ("model*.safetensors"): an existing folder that holds nothing else is replaced.

        `needed_bytes` must be free on its disk. Raises FileExistsError or NotADirectoryError for what is in the way,
        ValueError for other files in a folder to replace, a mount point, or a disk too full.
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
        """Makes the partial folder, empty. Raises FileExistsError where another process is writing it."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if self.partial.exists():  # what a killed run left, or one that still runs
            self._take_lock()
            shutil.rmtree(self.partial)
            self._release_lock()
        self.partial.mkdir()
        self._take_lock()

    def commit(self) -> None:
        """Puts the folder in its place. Raises FileExistsError where something came there meanwhile."""
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
            raise ValueError(
                f"{self.folder} is where a disk is mounted, and nothing can be renamed to there: choose a folder in it"
            )
        held = sorted(path.name for path in self.folder.iterdir())
        if held and not self._replace:
            raise FileExistsError(f"{self.folder} exists already and is not empty: choose another folder or remove it")
        if foreign := [name for name in held if not any(fnmatch(name, pattern) for pattern in self._replace)]:
            raise ValueError(
                f"{self.folder} is not replaced, because it also holds {listed(foreign)}, which would be lost: choose"
                " another folder, or move that away"
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
            # some network file systems have no locks; two runs at once are then the user's to avoid
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise

    def _release_lock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def partial_path(folder: Path) -> Path:
    """Where `folder` lies while it is written."""
    folder = _real(folder)
    return folder.with_name(f".{folder.name}.partial")


def _real(folder: Path) -> Path:
    """Where `folder` is in truth: a link to a folder stays, and what it names is written."""
    return Path(folder).resolve()


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raises ValueError where the disk that `folder` would be on has fewer than `needed_bytes` free."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise ValueError(
            f"{folder} needs {needed_bytes / _GIB:.2f} GiB and its disk has {free / _GIB:.2f} GiB free:"
            " make room or choose another folder"
        )


def check_apart(written: Path, flag: str, read: Path, read_flag: str) -> None:
    """Raises ValueError where writing the one folder would remove the other."""
    target, source = Path(written).resolve(), Path(read).resolve()
    if target == source or target in source.parents:
        raise ValueError(f"{flag} {written} holds {read_flag} {read}, which would be lost: choose another {flag}")
