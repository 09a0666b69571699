"""What weight sync asks of one inference server, and doing it on several servers at once.

`ServerControl` is a protocol: the object behind it lives in the room that talks to the engine. Promises that
an error names the server it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class WeightSyncError(RuntimeError):
    """Pushing weights to the servers failed; they may hold a mixture of old and new weights."""


class ServerControl(Protocol):
    """Blocking calls to one server; each raises an exception whose text says what the server answered."""

    @property
    def url(self) -> str:
        """The server's address, for messages."""

    def begin_weight_update(self) -> None:
        """Ends running requests, holds new ones and forgets every cached key and value."""

    def end_weight_update(self, version: str) -> None:
        """Names the weights that are loaded now, and lets held requests run."""

    def settle(self) -> None:
        """Returns once every process of the server has done all that it was asked before, and it goes on."""

    def weight_version(self) -> str:
        """The version of the weights that the server answers with."""

    def update_weights_from_tensor(
        self,
        serialized: list[str],
        *,
        load_format: str | None,
        weight_version: str | None,
        flush_cache: bool,
    ) -> None:
        """Loads tensors out of shared memory; one base64 payload per tensor-parallel rank."""

    def init_weights_update_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Joins a process group as ranks `rank_offset`, `rank_offset` + 1, ..."""

    def destroy_weights_update_group(self, group_name: str) -> None:
        """Leaves it again."""

    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        *,
        group_name: str,
        load_format: str | None,
        weight_version: str | None,
        flush_cache: bool,
    ) -> None:
        """Loads tensors that rank 0 of the group broadcasts meanwhile."""

    def update_weights_from_disk(self, model_path: str, *, weight_version: str | None, flush_cache: bool) -> None:
        """Loads the safetensors of a folder that the server can read."""

    def weights_checksum(self) -> list[dict[str, Any]]:
        """Per engine rank: {"checksums": {name: hex digest}, "parallelism_info": {"tp_rank": ..., ...}}."""


def on_all(servers: Sequence[ServerControl], call: Callable[[ServerControl], Result], what: str) -> list[Result]:
    """`call` on every server at the same time; results in the order of `servers`.

    Waits for all of them; raises WeightSyncError naming every server that failed.
    """
    if not servers:
        return []
    with ThreadPoolExecutor(max_workers=len(servers)) as pool:
        return results(servers, [pool.submit(call, server) for server in servers], what)


def results(servers: Sequence[ServerControl], futures: Sequence[Future[Result]], what: str) -> list[Result]:
    """The results of calls already under way; raises WeightSyncError naming every server that failed."""
    errors = {server.url: future.exception() for server, future in zip(servers, futures, strict=True)}
    failed = [f"{url}: {error}" for url, error in errors.items() if error is not None]
    if failed:
        cause = next(error for error in errors.values() if error is not None)
        raise WeightSyncError(f"{what} failed on {'; '.join(failed)}") from cause
    return [future.result() for future in futures]
