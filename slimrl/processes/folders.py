"""Safe use of folders: a lock that allows one run per folder, and private folders with predictable names (in /tmp).

The lock rejects a second run and names the holder's host, process and start. The kernel releases the lock with its
process, however that ends; the file alone does not lock. On a network file system the lock of a dead machine stays
until its lease expires (NFSv4: a minute or two; NFSv3: until the machine is back); the error names the file.
The driver locks `--save`, where two runs would delete each other's unfinished checkpoints.

A private folder belongs to this user, and no other user can change its contents.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK_NAME = ".slimrl_run.lock"  # hidden: a folder with only this file counts as empty
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # errors of file systems without locks


class FolderInUseError(RuntimeError):
    """Another running run writes to the folder, or the folder is not writable."""


@contextlib.contextmanager
def only_run_in(folder: str | Path, *, flag: str, name: str) -> Iterator[None]:
    """Holds the lock of `folder`, which is created if absent, for the length of the block.

    `name` is this run's name, for the error of a second run. Raises FolderInUseError, which names `flag`. On a file
    system without locks it only logs a warning.
    """
    path = Path(folder) / LOCK_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path, flag)
    except OSError as error:
        raise FolderInUseError(f"{flag} {folder} cannot be written: {error}: choose another folder") from error
    try:
        about = {"host": socket.gethostname(), "pid": os.getpid(), "since": _now(), "run": name}
        with contextlib.suppress(OSError):  # a full disk: the lock holds without its text
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(about).encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()  # before releasing the lock, or it could be the next holder's file
        os.close(descriptor)


def _locked(path: Path, flag: str) -> int:
    """Opens and locks the file at `path`; returns its descriptor."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(path, descriptor):
                return descriptor
        except BlockingIOError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise FolderInUseError(
                f"{flag} {path.parent} is used by another run{holder}: two runs would delete each other's unfinished"
                f" checkpoints; wait for its end, end it, or give another {flag}; if its machine is gone for good,"
                f" remove {path}"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            logger.warning(
                "the file system of %s %s has no locks (%s): make sure that no other run writes there",
                flag,
                path.parent,
                error.strerror,
            )
            return descriptor
        os.close(descriptor)  # its holder has just removed it: retry with the current file


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    """` (run r, process 12 on host h, since ...)` from the lock file; "" if it is unreadable."""
    try:
        about = json.loads(os.pread(descriptor, 4096, 0))
        return f" (run {about['run']}, process {about['pid']} on {about['host']}, since {about['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class NotPrivateError(OSError):
    """The path exists, and another user owns it or can write to it."""


def make_private(path: Path) -> Path:
    """The folder `path` with mode 0700, created if absent. Raises NotPrivateError or another OSError."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise NotPrivateError(f"{path} is not a folder that this user can open: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise NotPrivateError(f"{path} belongs to user {status.st_uid}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise NotPrivateError(f"{path} can be written to by others (mode {stat.S_IMODE(status.st_mode):o})")
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return path


def kernel_cache(inherited: Mapping[str, str]) -> dict[str, str]:
    """TORCHINDUCTOR_CACHE_DIR: this user's folder of compiled kernels, which outlives temporary folders of processes.

    Empty if `inherited` has it. Kernels are code: if the folder is not private to this user the variable stays unset,
    with a warning; kernels then go to the process's temporary folder and are removed with it.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in inherited:
        return {}
    # by number: in a container the user may have no name
    folder = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
    try:
        return {"TORCHINDUCTOR_CACHE_DIR": str(make_private(folder))}
    except OSError as error:
        logger.warning("compiled kernels are not cached: %s; remove it or set TORCHINDUCTOR_CACHE_DIR", error)
        return {}
