"""Where the training ranks find each other: a file on one machine, a port of rank 0 where they lie on several.

torch's store over TCP knows no key and listens on all addresses. The file lies in a folder that only its user may
enter; the port is bound to the one address that the others need. Used by the ranks' processes.
"""

from __future__ import annotations

import dataclasses
import datetime
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import FileStore, TCPStore


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Either a file, or host and port."""

    path: str | None = None
    host: str = ""
    port: int = 0


def open_meeting(
    host: str | None, world_size: int, timeout: datetime.timedelta
) -> tuple[Meeting, FileStore | TCPStore]:
    """For rank 0: `host` is the address that the others reach it at, None where all are on this machine."""
    if host is None:
        # goes with the temporary folder of this process
        meeting = Meeting(path=f"{tempfile.mkdtemp(prefix='meeting-')}/store")
        return meeting, join_meeting(meeting, world_size, timeout)
    # Bound here and kept, because a port that was only looked for may be somebody else's a moment later.
    from slimrl.weights.listening_store import listening_store

    store = listening_store(host, timeout)
    return Meeting(host=host, port=store.port), store


def join_meeting(meeting: Meeting, world_size: int, timeout: datetime.timedelta) -> FileStore | TCPStore:
    """For the other ranks."""
    from torch.distributed import FileStore, TCPStore

    if meeting.path is None:
        return TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
    store = FileStore(meeting.path, world_size)
    store.set_timeout(timeout)
    return store
