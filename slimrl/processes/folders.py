"""Safe use of folders: a lock that allows one run per folder, and private folders under guessable names (as in /tmp).

The lock rejects a second run and names the holder's host, process and start. The kernel drops the lock with its
process, however that died; the file alone means nothing. On a network file system the lock of a dead machine stays
until the server gives that machine up (NFSv4: a minute or two; NFSv3: until it is back), and the error names the file.
The driver locks `--save`, where two runs would delete each other's unfinished checkpoints.

A private folder belongs to this user, and no other user can change what is in it.
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

LOCK_NAME = ".slimrl_run.lock"  # hidden: a folder that holds nothing else counts as empty
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # what file systems without locks answer


class FolderInUseError(RuntimeError):
    """Another run, which is alive, writes to the folder; or nobody can."""


@contextlib.contextmanager
def only_run_in(folder: str | Path, *, flag: str, name: str) -> Iterator[None]:
    """Holds the lock of `folder`, which is made where it is absent, for the length of the block.

    `name` is this run's, for whoever comes second. Raises FolderInUseError, which names `flag`. Where the file system
    has no locks, a warning says that nobody is kept out.
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
            path.unlink()  # before the lock goes, or it could be the next one's file
        os.close(descriptor)


def _locked(path: Path, flag: str) -> int:
    """The open and locked file that is at `path`."""
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
                f"{flag} {path.parent} is written by another run{holder}: two would delete each other's unfinished"
                f" checkpoints; wait for its end, end it, or give another {flag}; where its machine is gone for good,"
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
        os.close(descriptor)  # its holder has just removed it: once more, with the file that is there now


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    """` (run r, process 12 on host h, since ...)`, as far as its file says so."""
    try:
        about = json.loads(os.pread(descriptor, 4096, 0))
        return f" (run {about['run']}, process {about['pid']} on {about['host']}, since {about['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class NotPrivateError(OSError):
    """There is something of that name, and somebody else made it or can write into it."""


def make_private(path: Path) -> Path:
    """The folder `path` with mode 0700, made where there is none. Raises NotPrivateError, and OSError."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise NotPrivateError(f"{path} is no folder that this user can open: {error.strerror}") from error
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
    """TORCHINDUCTOR_CACHE_DIR: where this user's compiled kernels outlive the temporary folder of one process.

    Nothing where `inherited` has it. Kernels are code: where the folder is not this user's alone the variable is left
    out, with a warning; kernels are then compiled in the process's own temporary folder and go with it.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in inherited:
        return {}
    # by number: in a container the user may have no name
    folder = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
    try:
        return {"TORCHINDUCTOR_CACHE_DIR": str(make_private(folder))}
    except OSError as error:
        logger.warning("compiled kernels are not kept: %s; remove it or set TORCHINDUCTOR_CACHE_DIR", error)
        return {}
