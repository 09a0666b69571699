"""A store of torch's that listens on one address: torch itself opens the port on all of them, whatever host it is told.

Called by whoever opens a process group across processes that share no folder.
"""

from __future__ import annotations

import datetime
import socket

from torch.distributed import TCPStore

BACKLOG = 2048


def listening_store(
    host: str, timeout: datetime.timedelta, *, world_size: int | None = None, port: int = 0
) -> TCPStore:
    """The store's server and its first client, on `host` and a free port (or `port`); it does not wait for others."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.bind(address)
        listener.listen(BACKLOG)
        return TCPStore(
            host,
            listener.getsockname()[1],
            world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=False,
            master_listen_fd=listener.detach(),
        )
