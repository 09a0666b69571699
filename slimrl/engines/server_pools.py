"""Connections to the servers themselves, for requests that the router does not pass on whole.

sglang-router 0.3.2 reads a request for generation into fields that it knows: `return_routed_experts` gets lost. Such
requests choose a server here, as the router would: the one with the fewest of them in flight, and the same one for all
requests of a session, as long as it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from slimrl.engines.http import ConnectionPool

AVOIDED_S = 10.0  # a server that a request did not reach


class ServerPools:
    """A pool of connections to each server. Use within one event loop."""

    def __init__(self, headers: Mapping[str, str], *, connect_timeout_s: float) -> None:
        self._headers, self._connect_timeout_s = dict(headers), connect_timeout_s
        self._pools: dict[str, ConnectionPool] = {}
        self._in_flight: Counter[str] = Counter()
        self._failed_at: dict[str, float] = {}

    @contextlib.contextmanager
    def chosen(self, urls: Sequence[str], session_id: str | None) -> Iterator[tuple[str, ConnectionPool]]:
        """One of the servers at `urls`, for the request that is made within the context, and its connections.

        An error of the connection makes other requests avoid the server for a while.
        """
        url = self._choose(urls, session_id)
        if url not in self._pools:
            self._pools[url] = ConnectionPool(url, self._headers, connect_timeout_s=self._connect_timeout_s)
        self._in_flight[url] += 1
        try:
            yield url, self._pools[url]
        except ConnectionError:
            self._failed_at[url] = time.monotonic()
            raise
        finally:
            self._in_flight[url] -= 1

    def _choose(self, urls: Sequence[str], session_id: str | None) -> str:
        if not urls:
            raise ConnectionRefusedError("no server is there")
        now = time.monotonic()
        reached = [url for url in urls if now - self._failed_at.get(url, -AVOIDED_S) >= AVOIDED_S] or list(urls)
        if session_id is not None:  # rendezvous hashing: another server's loss moves no session of this one
            return max(reached, key=lambda url: hashlib.blake2b(f"{session_id}\x1f{url}".encode()).digest())
        return min(reached, key=lambda url: self._in_flight[url])

    async def close(self) -> None:
        """Drops every connection; the requests in flight fail. Later requests open new ones."""
        pools, self._pools = list(self._pools.values()), {}
        await asyncio.gather(*(pool.close() for pool in pools))
