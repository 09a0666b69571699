"""Folders under a name that others can foresee, in a folder that others can write to, such as /tmp.

Promises that what is used belongs to this user and that nobody else can change what is in it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)


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
