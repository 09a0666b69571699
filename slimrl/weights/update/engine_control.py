"""What a weight update asks of an inference server: the calls, running them on all servers at once, their timeline.

`ServerControl` is a protocol; its implementation is in the package that talks to the engine. Errors name their server.
After a failed update, `states` reports the weight version of each server, or why it does not answer.

`traced` records how long each call took, as the server's own row in the timeline. It raises what the control raises.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, Protocol, TypeVar, cast

from slimrl.engines.protocol import EngineError, EngineTimeoutError
from slimrl.engines.sglang.control import RunningRequests
from slimrl.observability.tracer import Timeline
from slimrl.platform.collective_errors import SyncError

Result = TypeVar("Result")


class WeightSyncError(SyncError):
    """A weight update of the servers failed; they may hold a mixture of old and new weights."""


class ServerControl(Protocol):
    """Blocking calls to one server; each raises an exception whose text says what the server answered."""

    @property
    def url(self) -> str:
        """The server's address, for messages."""

    def begin_weight_update(self, running: RunningRequests) -> None:
        """Ends ("abort") or holds ("retract") running requests, holds new ones, forgets every cached key and value."""

    def commit_weight_update(self, version: str, running: RunningRequests) -> None:
        """Names the weights that are loaded now; requests are still held."""

    def continue_(self) -> None:
        """Lets held requests run."""

    def settle(self) -> None:
        """Returns once every process of the server has done all that it was asked before, and it continues."""

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
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: Literal["nccl", "gloo"],
    ) -> None:
        """Joins a process group as ranks `rank_offset`, `rank_offset` + 1, ..."""

    def destroy_weights_update_group(self, group_name: str, *, timeout_s: float | None = None) -> None:
        """Leaves it again, or raises after `timeout_s`."""

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
    """The results of calls already in progress; raises WeightSyncError naming every server that failed.

    It is final where one did not answer in time: that server may still be at work on the call.
    """
    errors = {server.url: future.exception() for server, future in zip(servers, futures, strict=True)}
    failed = [f"{url}: {error}" for url, error in errors.items() if error is not None]
    if failed:
        causes = [error for error in errors.values() if error is not None]
        late = any(isinstance(error, EngineTimeoutError) for error in causes)
        raise WeightSyncError(f"{what} failed on {'; '.join(failed)}", final=late) from causes[0]
    return [future.result() for future in futures]


@dataclasses.dataclass(frozen=True)
class ServerState:
    """How a server stands after a failed weight update: the version that it reports, or why it does not answer."""

    url: str
    version: str | None
    silence: str | None

    def __str__(self) -> str:
        if self.silence is None:
            return f"{self.url} is stopped and reports version {self.version!r}"
        return f"{self.url} does not answer ({self.silence})"


def states(servers: Sequence[ServerControl]) -> list[ServerState]:
    """How each server stands now; never raises for one that does not answer."""

    def state(server: ServerControl) -> ServerState:
        try:
            return ServerState(server.url, server.weight_version(), None)
        except EngineError as error:
            return ServerState(server.url, None, str(error))

    return on_all(servers, state, "asking for the weight version")


TRACK = "calls from training"


def traced(server: ServerControl, timeline: Timeline) -> ServerControl:
    """`server`, of which every call is noted; itself where nothing is recorded."""
    return cast(ServerControl, _TracedServer(server, timeline)) if timeline.records else server


class _TracedServer:
    def __init__(self, server: ServerControl, timeline: Timeline) -> None:
        self._server = server
        self._timeline = timeline

    @property
    def url(self) -> str:
        return self._server.url

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._call, name.rstrip("_"), getattr(self._server, name))

    def _call(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        started = time.monotonic_ns()
        try:
            return call(*arguments, **options)
        finally:
            server = f"server {self._server.url}"
            self._timeline.beside(TRACK, name, started, time.monotonic_ns(), process=server)
