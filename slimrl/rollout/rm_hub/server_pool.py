"""Requests to the SGLang servers of one model: a reward model, or the teacher of on-policy distillation.

Each request goes to the server with the fewest; if a server is unreachable, another one answers. At most `concurrency`
requests are in flight per server, and every wait is bounded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from slimrl.rollout.rm_hub.remote import MAX_REPLY_BYTES, TIME_LIMIT_S, RemoteReward, RemoteUnreachable

logger = logging.getLogger(__name__)

AVOIDED_S = 60.0  # an unreachable server is used only as the last choice for this long
_Answer = TypeVar("_Answer")


def addresses(url: str) -> list[str]:
    """The server addresses in `--rm-url`."""
    return [part.strip().rstrip("/") for part in url.split(",") if part.strip()]


@dataclasses.dataclass(eq=False)
class _Server:
    """One server, its requests in flight, and until when (`time.monotonic`) it is used only as the last choice."""

    url: str
    service: RemoteReward
    slots: asyncio.Semaphore
    in_flight: int = 0
    avoided_until: float = 0.0


class ServerPool:
    """The servers at `urls`; messages call them "<owner>'s server <url>"."""

    def __init__(
        self,
        urls: list[str],
        path: str,
        *,
        owner: str,
        concurrency: int,
        key: str | None,
        time_limit_s: float = TIME_LIMIT_S,
        max_reply_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        """Requests are posted to `path`; `key` is sent as the bearer token."""
        self._servers = [
            _Server(
                url,
                RemoteReward(
                    f"{url}{path}",
                    name=f"{owner}'s server {url}",
                    key=key,
                    time_limit_s=time_limit_s,
                    max_reply_bytes=max_reply_bytes,
                ),
                asyncio.Semaphore(concurrency),
            )
            for url in urls
        ]
        self._slots = asyncio.Semaphore(concurrency * len(urls))

    async def ask(self, body: bytes, read: Callable[[bytes, str], _Answer]) -> _Answer:
        """`read(response, url)` of the first reachable server's response to this JSON.

        Raises RemoteRefused for HTTP 3xx or 4xx, RemoteUnreachable if all attempts on all servers fail, and the errors
        of `read`.
        """
        async with self._slots:
            remaining = list(self._servers)
            while True:
                now = time.monotonic()
                server = min(remaining, key=lambda one: (one.avoided_until > now, one.in_flight))
                remaining.remove(server)
                server.in_flight += 1
                try:
                    async with server.slots:
                        return read(await server.service.ask(body), server.url)
                except RemoteUnreachable as error:
                    server.avoided_until = time.monotonic() + AVOIDED_S
                    if not remaining:
                        raise
                    logger.warning("%s; retrying on another server", error)
                finally:
                    server.in_flight -= 1

    def close(self) -> None:
        """Closes the connections."""
        for server in self._servers:
            server.service.close()
