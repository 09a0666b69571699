"""The memory of all servers of a run: released while training has the GPUs, then resumed.

Enforces the order of the calls, because the servers check nothing: a server crashes if it resumes memory that it still
has, and generates garbage if it has none. So invalid calls raise here. Without a GPU the servers accept the same calls
and keep their memory. Used by the rollout manager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from slimrl.engines.protocol import EngineError, EngineUnavailableError
from slimrl.engines.server_protocol import EVERYTHING, MemoryControl


class EngineMemoryError(EngineError):
    """A call needs memory that the servers have released, or the reverse."""


class ReleasableMemory(Protocol):
    """The memory of all servers, for code that shares GPUs with them; implemented by `EngineMemory`."""

    def release(self) -> None:
        """Releases all memory of every server; none may have requests left."""

    def resume(self, tags: Sequence[str]) -> None:
        """Reallocates the memory of `tags` on every server; its contents are lost."""


class EngineMemory:
    """Starts with all memory resident.

    Assign `servers` when they change. `when_lost(server, error)` is called, from any thread, for a server that is gone
    or hangs; the others continue without it. If it is None, such an error is raised.
    """

    def __init__(
        self, servers: Sequence[MemoryControl], when_lost: Callable[[MemoryControl, EngineError], None] | None = None
    ) -> None:
        self.servers = list(servers)
        self.when_lost = when_lost
        self.released: tuple[str, ...] = ()  # tags

    def release(self) -> None:
        """Releases all memory of every server; none may have requests left.

        Raises EngineError if some memory is released already, or a server has requests that do not end.
        """
        if self.released:
            raise EngineMemoryError(
                f"the engines cannot release their memory: {_listed(self.released)} is released already"
            )
        # releasing the memory of a busy server crashes it; flush_cache raises for a busy server
        self._on_all(lambda server: server.flush_cache())
        self._on_all(lambda server: server.release_memory(EVERYTHING))
        self.released = EVERYTHING

    def resume(self, tags: Sequence[str] = EVERYTHING) -> None:
        """Reallocates the memory of `tags` on every server; its contents are lost. Raises EngineError if resident."""
        if present := [tag for tag in tags if tag not in self.released]:
            raise EngineMemoryError(f"the engines cannot resume {_listed(present)}: that memory is not released")
        self._on_all(lambda server: server.resume_memory(tags))
        self.released = tuple(tag for tag in self.released if tag not in tags)

    def adopt(self, server: MemoryControl) -> None:
        """Releases the same memory on a newly started server as on the others. Raises EngineError."""
        if self.released:
            server.flush_cache()
            server.release_memory(self.released)

    def require(self, action: str, tags: Sequence[str] = EVERYTHING) -> None:
        """Raises EngineError unless the servers have the memory of `tags`."""
        if absent := [tag for tag in tags if tag in self.released]:
            raise EngineMemoryError(
                f"{action} needs the engines' {_listed(absent)}, which is released while training runs"
            )

    def _on_all(self, call: Callable[[MemoryControl], None]) -> None:
        if not self.servers:
            return
        with ThreadPoolExecutor(max_workers=len(self.servers)) as pool:
            futures = [(server, pool.submit(call, server)) for server in self.servers]
        for server, future in futures:
            try:
                future.result()
            except EngineUnavailableError as error:
                if self.when_lost is None:
                    raise
                self.servers = [other for other in self.servers if other is not server]
                self.when_lost(server, error)


def _listed(tags: Sequence[str]) -> str:
    return " and ".join(", ".join(tags).replace("_", " ").rsplit(", ", 1))
