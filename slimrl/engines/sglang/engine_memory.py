"""The memory of all servers of a run: taken from them while training has the GPUs, and given back.

Owns the order of the calls. The servers themselves check nothing: one that is told to resume what it still has ends at
once, and one that is asked for tokens while it has no memory answers with what it finds there. So every call that must
fail is refused here. Without a GPU the servers answer the same calls and keep their memory. Used by the rollout
manager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from slimrl.engines.protocol import EngineError, EngineUnavailableError

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
CUDA_GRAPHS = "cuda_graph"
EVERYTHING = (WEIGHTS, KV_CACHE, CUDA_GRAPHS)


class EngineMemoryError(EngineError):
    """The servers' memory is not where a call needs it."""


class Server(Protocol):
    """The calls of `ServerControl` that this needs."""

    @property
    def url(self) -> str: ...

    def flush_cache(self) -> None: ...

    def release_memory(self, tags: Sequence[str] | None) -> None: ...

    def resume_memory(self, tags: Sequence[str] | None) -> None: ...


class EngineMemory:
    """Starts with everything in place.

    `servers` may be set again when they change. `when_lost(server, error)` is told of one that is gone or hangs,
    without which the others continue; it may be called from any thread. Where it is None such an error is raised.
    """

    def __init__(
        self, servers: Sequence[Server], when_lost: Callable[[Server, EngineError], None] | None = None
    ) -> None:
        self.servers = list(servers)
        self.when_lost = when_lost
        self.released: tuple[str, ...] = ()  # tags

    def release(self) -> None:
        """Takes all memory from every server; none may have requests left.

        Raises EngineError: where some of it is released already, or a server has requests that do not end.
        """
        if self.released:
            raise EngineMemoryError(
                f"the engines cannot release their memory: {_listed(self.released)} is released already"
            )
        # a server that still works ends when its memory is taken; the flush is refused by such a one
        self._on_all(lambda server: server.flush_cache())
        self._on_all(lambda server: server.release_memory(EVERYTHING))
        self.released = EVERYTHING

    def resume(self, tags: Sequence[str] = EVERYTHING) -> None:
        """Gives every server the memory of `tags` again; what was in it is lost. Raises EngineError where it has it."""
        if present := [tag for tag in tags if tag not in self.released]:
            raise EngineMemoryError(f"the engines cannot resume {_listed(present)}: that memory is not released")
        self._on_all(lambda server: server.resume_memory(tags))
        self.released = tuple(tag for tag in self.released if tag not in tags)

    def adopt(self, server: Server) -> None:
        """Brings a server that has just started to where the others are. Raises EngineError."""
        if self.released:
            server.flush_cache()
            server.release_memory(self.released)

    def require(self, action: str, tags: Sequence[str] = EVERYTHING) -> None:
        """Raises EngineError unless the servers have the memory of `tags`."""
        if absent := [tag for tag in tags if tag in self.released]:
            raise EngineMemoryError(
                f"{action} needs the engines' {_listed(absent)}, which is released while training works"
            )

    def _on_all(self, call: Callable[[Server], None]) -> None:
        if not self.servers:
            return
        with ThreadPoolExecutor(max_workers=len(self.servers)) as pool:
            under_way = [(server, pool.submit(call, server)) for server in self.servers]
        for server, done in under_way:
            try:
                done.result()
            except EngineUnavailableError as error:
                if self.when_lost is None:
                    raise
                self.servers = [other for other in self.servers if other is not server]
                self.when_lost(server, error)


def _listed(tags: Sequence[str]) -> str:
    return " and ".join(", ".join(tags).replace("_", " ").rsplit(", ", 1))
