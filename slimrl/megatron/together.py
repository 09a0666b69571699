"""One step on every rank, of which an error on one becomes an error on all: nobody waits for a rank that failed.

Called by whatever writes files that other ranks rely on.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

_Result = TypeVar("_Result")


class CheckpointError(RuntimeError):
    """A checkpoint or an export was not written on some rank; what was complete before is as it was."""


def room_left(error: BaseException) -> str:
    """For an OSError of a disk without room: how much is left where it was written; else nothing."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is None:
        return ""
    try:
        free = shutil.disk_usage(Path(error.filename).parent).free
    except OSError:
        return ""
    return f" ({free / 2**30:.2f} GiB are free there)"


def together(step: Callable[[], _Result], group: dist.ProcessGroup | None = None) -> _Result:
    """Run `step` on every rank of `group` (None: all ranks) and return its result once all are done; collective.

    Raises CheckpointError on every rank, naming the first that failed, where a step ended with an OSError, ValueError
    or RuntimeError.
    """
    result = failure = None
    try:
        result = step()
    except (OSError, ValueError, RuntimeError) as error:
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}{room_left(failure)}"
    texts: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, text, group=group)
    for rank, found in enumerate(texts):
        if found is not None:
            raise CheckpointError(f"rank {rank}: {found}") from failure
    return result


def on_lead(step: Callable[[], object], group: dist.ProcessGroup | None = None) -> None:
    """`together` for what rank 0 does alone."""
    together(step if dist.get_rank() == 0 else lambda: None, group)
