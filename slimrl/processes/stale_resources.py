"""Removes folders and shared memory that killed processes left, at the next start.

An owned folder (`owned_folder`, `own`) contains a mark: a file that its owner keeps locked. The kernel releases the
lock when the owner ends, however it ends. `remove_stale` removes owned folders whose lock is free, and the files in
/dev/shm that they list and that no process has mapped. It touches nothing without a mark, of another user, or of a
living owner. Uses only the standard library and no import of slimrl: `subreaper` loads this file without the package.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "slimrl-"
OWNER = ".slimrl-owner"
SHARED_MEMORY = "/dev/shm"
_MARK = b"slimrl: this folder belongs to the process that holds the lock of this file\n"


class Owner:
    """The lock on a folder: held until `release`, or until this process has ended."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        """The lock's file descriptor, -1 once released; a child that inherits it (`pass_fds`) owns the folder, too."""
        return self._descriptor

    def add_shared_memory(self, path: str) -> None:
        """Lists a file of /dev/shm for removal with the folder; ignores one that is gone."""
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(path, follow_symlinks=False)
            name = os.path.basename(path)
            os.write(self._descriptor, f"{status.st_dev} {status.st_ino} {name}\n".encode())

    def release(self) -> None:
        """Gives up ownership of the folder. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def own(folder: str | os.PathLike[str]) -> Owner:
    """Makes this process the owner of an existing folder. Child processes do not inherit the lock.

    On a file system without locks the folder gets no mark, so that no later start removes it.
    """
    unlocked = os.path.join(folder, f"{OWNER}.new")
    descriptor = os.open(unlocked, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
    owner = Owner(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        os.unlink(unlocked)
        return owner
    os.write(descriptor, _MARK + _of_this_boot())
    os.rename(unlocked, os.path.join(folder, OWNER))  # rename after locking: the mark is never visible unlocked
    return owner


@contextlib.contextmanager
def owned_folder(prefix: str, parent: str | None = None) -> Iterator[Path]:
    """A private folder in `parent` (default: the temporary folder), removed at the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    owner = own(folder)
    try:
        yield folder
    finally:
        remove(folder)
        owner.release()


def remove(folder: str | os.PathLike[str]) -> None:
    """Removes a folder, its mark last: if this process is killed meanwhile, the next start removes the rest."""
    with contextlib.suppress(OSError):
        for name in set(os.listdir(folder)) - {OWNER}:
            path = os.path.join(folder, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
    shutil.rmtree(folder, ignore_errors=True)


def remove_stale(parent: str | os.PathLike[str] | None = None, shared_memory: str = SHARED_MEMORY) -> list[str]:
    """Removes what killed processes of this user left in `parent` (default: the temporary folder) and `shared_memory`.

    Returns the removed paths. Keeps a folder that contains folders of living owners.
    """
    removed: list[str] = []
    for root in (tempfile.gettempdir() if parent is None else parent, shared_memory):
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(root)):
                if name.startswith(PREFIX):
                    _remove_ownerless(os.path.join(root, name), shared_memory, removed)
    return removed


def _remove_ownerless(folder: str, shared_memory: str, removed: list[str]) -> bool:
    """Removes `folder` if it is owned and its owner is dead; False if an owned folder remains."""
    with contextlib.ExitStack() as stack:
        try:
            mark = _free_mark(folder, stack)
        except BlockingIOError:
            return False
        except OSError:  # of another user, not marked, or already gone
            return True
        inner = [os.path.join(folder, name) for name in os.listdir(folder) if name.startswith(PREFIX)]
        if not all([_remove_ownerless(one, shared_memory, removed) for one in inner]):
            return False
        for path in _listed(mark, shared_memory):
            with contextlib.suppress(OSError):
                os.unlink(path)
                removed.append(path)
        remove(folder)
        removed.append(folder)
        return True


def _free_mark(folder: str, stack: contextlib.ExitStack) -> bytes:
    """The contents of the mark of this user's `folder`, with its lock held until `stack` closes.

    Raises BlockingIOError if a living process holds the lock, another OSError if the folder is not an owned one.
    """
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    stack.callback(os.close, directory)
    descriptor = os.open(OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    stack.callback(os.close, descriptor)
    status = os.fstat(descriptor)
    ours = {os.fstat(directory).st_uid, status.st_uid} == {os.geteuid()}
    if not ours or not stat.S_ISREG(status.st_mode):
        raise PermissionError(f"{folder} belongs to another user")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with os.fdopen(os.dup(descriptor), "rb") as file:
        mark = file.read()
    if not mark.startswith(_MARK) or os.fstat(descriptor).st_nlink == 0:
        raise FileNotFoundError(f"{folder} has no mark")
    if not mark.startswith(_MARK + _of_this_boot()):
        raise PermissionError(f"{folder} is from another machine or an earlier boot: its lock is not valid here")
    return mark


def _of_this_boot() -> bytes:
    """A line that identifies this boot of this machine: some shared file systems keep locks local to a machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return b"boot " + file.read()
    except OSError:
        return b""


def _listed(mark: bytes, shared_memory: str) -> list[str]:
    """The listed files that are unchanged and that no process has mapped."""
    found: dict[str, str] = {}
    for line in mark.removeprefix(_MARK + _of_this_boot()).decode(errors="replace").splitlines():
        if len(words := line.split(" ", 2)) < 3:  # truncated by a full disk
            continue
        device, inode, name = words
        path = os.path.join(shared_memory, os.path.basename(name))
        with contextlib.suppress(OSError):
            status = os.stat(path, follow_symlinks=False)
            same = (str(status.st_dev), str(status.st_ino), status.st_uid) == (device, inode, os.geteuid())
            if same and stat.S_ISREG(status.st_mode):
                found[inode] = path
    in_use = _mapped_inodes() if found else set()
    return [path for inode, path in found.items() if inode not in in_use]


def _mapped_inodes() -> set[str]:
    """Inode numbers of all files mapped by living processes, on any device."""
    inodes = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/maps") as maps:
                inodes |= {words[4] for line in maps if len(words := line.split(maxsplit=5)) > 5}
    return inodes
