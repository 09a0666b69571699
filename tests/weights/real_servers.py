"""Starts real SGLang servers side by side for the tests of a module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from slimrl.engines.sglang.server import ServerProcess


@contextlib.contextmanager
def running(servers: Sequence[ServerProcess]) -> Iterator[list[str]]:
    """Their URLs; within the block all of them are ready."""
    try:
        for server in servers:
            server.start()
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda server: server.wait_ready(120), servers))
        yield [server.url for server in servers]
    finally:
        for server in servers:
            server.stop()
