"""Runs the calls of a weight update (`engines.server_protocol.WeightControl`) on all servers in parallel.

Errors name their server. After a failed update, `probe_all` returns the weight version of each server, or the reason
that it does not answer. `traced` records the duration of each call in the server's own row of the timeline.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, ParamSpec, TypeVar

from slimrl.engines.backend import backend
from slimrl.engines.protocol import EngineError, EngineTimeoutError
from slimrl.engines.server_protocol import RunningRequests, WeightControl
from slimrl.observability.tracer import Timeline
from slimrl.platform.collective_errors import RankSync, SyncError
from slimrl.weights.update.topology import EngineEndpoint

Inputs = ParamSpec("Inputs")
Result = TypeVar("Result")


class WeightSyncError(SyncError):
    """A weight update of the servers failed; they may hold a mixture of old and new weights."""


class WeightsDifferError(WeightSyncError):
    """A server has other weights than those that it should have."""


def call_all(servers: Sequence[WeightControl], call: Callable[[WeightControl], Result], what: str) -> list[Result]:
    """Runs `call` on all servers in parallel and waits for all; returns the results in the order of `servers`.

    Raises WeightSyncError naming every server that failed.
    """
    if not servers:
        return []
    with ThreadPoolExecutor(max_workers=len(servers)) as pool:
        return collect_results(servers, [pool.submit(call, server) for server in servers], what)


def collect_results(servers: Sequence[WeightControl], futures: Sequence[Future[Result]], what: str) -> list[Result]:
    """The results of calls in progress; raises WeightSyncError naming every server that failed.

    The error is final if a server timed out, because that server may still be processing the call.
    """
    errors = {server.url: future.exception() for server, future in zip(servers, futures, strict=True)}
    failed = [f"{url}: {error}" for url, error in errors.items() if error is not None]
    if failed:
        causes = [error for error in errors.values() if error is not None]
        late = any(isinstance(error, EngineTimeoutError) for error in causes)
        raise WeightSyncError(f"{what} failed on {'; '.join(failed)}", final=late) from causes[0]
    return [future.result() for future in futures]


def commit_all(servers: Sequence[WeightControl], version: str, running: RunningRequests) -> None:
    """Sets the version of the loaded weights on all servers; raises WeightSyncError unless each reports it then."""

    def commit(server: WeightControl) -> str:
        server.commit_weight_update(version, running)
        return server.weight_version()

    reported = call_all(servers, commit, "naming the new weights")
    other = {server.url: found for server, found in zip(servers, reported, strict=True) if found != version}
    if other:
        names = ", ".join(f"{url} reports {found!r}" for url, found in other.items())
        raise WeightSyncError(
            f"after the update to weight version {version!r}, {names}: these servers do not have the new weights"
        )


def load_from_disk(servers: Sequence[WeightControl], folder: str) -> None:
    """Makes the servers load the folder; raises WeightSyncError naming every server that failed."""
    call_all(
        servers,
        lambda server: server.update_weights_from_disk(folder, weight_version=None, flush_cache=False),
        f"loading weights from {folder}",
    )


@dataclasses.dataclass(frozen=True)
class ServerState:
    """State of a server after a failed weight update: the version it reports, or why it does not answer."""

    url: str
    version: str | None
    error: str | None
    doing: str = "is stopped"

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.url} {self.doing} and reports version {self.version!r}"
        return f"{self.url} does not answer ({self.error})"


def probe_all(servers: Sequence[WeightControl]) -> list[ServerState]:
    """The current state of each server; never raises for one that does not answer."""

    def state(server: WeightControl) -> ServerState:
        try:
            return ServerState(server.url, server.weight_version(), None)
        except EngineError as error:
            return ServerState(server.url, None, str(error))

    return call_all(servers, state, "asking for the weight version")


ENGINES_OF_ONE_RANK = 32


def callers_of(servers: int, ranks: int, of_one_rank: int = ENGINES_OF_ONE_RANK) -> int:
    """The number of trainer ranks that call so many servers."""
    return max(min(ranks, -(-servers // of_one_rank)), 1)


class EngineCalls:
    """The calls of an update without weights in them, divided over the trainer ranks; its methods are collective.

    A call costs its rank a part of a millisecond, so that one rank would be busy for seconds with thousands of servers.
    Every rank has about `of_one_rank` of them, as long as there are ranks; with fewer servers rank 0 calls all, because
    a round of all ranks takes milliseconds, too.
    """

    consequence = "so no server resumes"  # of a failed update

    def __init__(
        self,
        servers: Sequence[WeightControl],
        with_stages: Sequence[int],
        rank: int,
        ranks: RankSync,
        timeline: Timeline,
        of_one_rank: int = ENGINES_OF_ONE_RANK,
    ) -> None:
        """`with_stages` are the indices of servers with pipeline stages."""
        callers = callers_of(len(servers), ranks.size, of_one_rank)
        own = range(rank, len(servers), callers) if rank < callers else range(0)
        self._servers = [servers[number] for number in own]
        self._with_stages = [servers[number] for number in own if number in with_stages]
        self._one_caller = callers == 1
        self._ranks, self._timeline = ranks, timeline

    def begin(self, running: RunningRequests) -> None:
        """Stops every server. Raises WeightSyncError on every rank."""
        self._ranks.run_on_all_ranks(
            lambda: call_all(self._servers, lambda server: server.begin_weight_update(running), "stopping for weights")
        )

    @property
    def divided(self) -> bool:
        """Whether other ranks than rank 0 call servers."""
        return not self._one_caller

    def load_from_disk(self, folder: str) -> None:
        """Makes every server load the folder. Raises WeightSyncError on every rank."""
        self._ranks.run_on_all_ranks(lambda: load_from_disk(self._servers, folder))

    def commit_and_resume(self, version: str, running: RunningRequests) -> tuple[str, bool] | None:
        """All servers resume once all report `version`; raises WeightSyncError on every rank if one does not.

        Returns the failure to resume (message, whether it is final): all servers have the same version then, so that no
        attempt must be repeated.
        """

        def commit() -> None:
            commit_all(self._servers, version, running)

        def resume() -> tuple[str, bool] | None:
            self._timeline.mark("servers continue")
            return self._resume(version)

        if self._one_caller:  # in one round of the ranks

            def both() -> tuple[str, bool] | None:
                commit()
                return resume()

            return self._ranks.run_on_rank_zero(both)
        self._ranks.run_on_all_ranks(commit)
        failures = [failure for failure in self._ranks.run_on_all_ranks(resume) if failure is not None]
        return ("; ".join(text for text, _ in failures), any(final for _, final in failures)) if failures else None

    def _resume(self, version: str) -> tuple[str, bool] | None:
        try:
            call_all(self._servers, lambda server: server.continue_(), "continuing with new weights")
            call_all(self._with_stages, lambda server: server.flush_pipeline(), "waiting for the later pipeline stages")
        except WeightSyncError as error:
            states = ", ".join(map(str, probe_all(self._servers)))
            return f"every server has weight version {version!r}, and not all resume: {error}; {states}", error.final
        return None

    def states(self) -> list[ServerState]:
        """The current state of every server, on every rank; never raises for one that does not answer."""
        return [
            state for of_rank in self._ranks.run_on_all_ranks(lambda: probe_all(self._servers)) for state in of_rank
        ]


TRACK = "calls from training"


def traced(server: WeightControl, timeline: Timeline) -> WeightControl:
    """`server` with every call recorded in `timeline`; `server` itself if the timeline is off."""
    return _TracedServer(server, timeline) if timeline.records else server


class _TracedServer:
    def __init__(self, server: WeightControl, timeline: Timeline) -> None:
        self._server = server
        self._timeline = timeline

    @property
    def url(self) -> str:
        return self._server.url

    def begin_weight_update(self, running: RunningRequests) -> None:
        self._record(self._server.begin_weight_update, running)

    def commit_weight_update(self, version: str, running: RunningRequests) -> None:
        self._record(self._server.commit_weight_update, version, running)

    def continue_(self) -> None:
        self._record(self._server.continue_)

    def flush_pipeline(self) -> None:
        self._record(self._server.flush_pipeline)

    def weight_version(self) -> str:
        return self._record(self._server.weight_version)

    def update_weights_from_tensor(
        self, serialized: list[str], *, load_format: str | None, weight_version: str | None, flush_cache: bool
    ) -> None:
        self._record(
            self._server.update_weights_from_tensor,
            serialized,
            load_format=load_format,
            weight_version=weight_version,
            flush_cache=flush_cache,
        )

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
        self._record(
            self._server.init_weights_update_group,
            master_address=master_address,
            master_port=master_port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
        )

    def destroy_weights_update_group(self, group_name: str, *, timeout_s: float | None = None) -> None:
        self._record(self._server.destroy_weights_update_group, group_name, timeout_s=timeout_s)

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
        self._record(
            self._server.update_weights_from_distributed,
            names,
            dtypes,
            shapes,
            group_name=group_name,
            load_format=load_format,
            weight_version=weight_version,
            flush_cache=flush_cache,
        )

    def update_weights_from_disk(self, model_path: str, *, weight_version: str | None, flush_cache: bool) -> None:
        self._record(
            self._server.update_weights_from_disk, model_path, weight_version=weight_version, flush_cache=flush_cache
        )

    def update_weights_from_changes(self, serialized: list[str]) -> None:
        self._record(self._server.update_weights_from_changes, serialized)

    def update_weights_from_shards(self, serialized: list[str], timeout_s: float | None = None) -> None:
        self._record(self._server.update_weights_from_shards, serialized, timeout_s)

    def load_adapter(
        self, name: str, config: dict[str, Any], serialized: list[str], checksums: dict[str, str] | None
    ) -> None:
        self._record(self._server.load_adapter, name, config, serialized, checksums)

    def unload_adapter(self, name: str) -> None:
        self._record(self._server.unload_adapter, name)

    def adapter_requests(self) -> dict[str, int]:
        return self._record(self._server.adapter_requests)

    def weights_checksum(self) -> list[dict[str, Any]]:
        return self._record(self._server.weights_checksum)

    def _record(self, call: Callable[Inputs, Result], *arguments: Inputs.args, **options: Inputs.kwargs) -> Result:
        started = time.monotonic_ns()
        try:
            return call(*arguments, **options)
        finally:
            server, name = f"server {self._server.url}", call.__name__.rstrip("_")
            self._timeline.add_span(TRACK, name, started, time.monotonic_ns(), process=server)


def connect(
    engines: Sequence[EngineEndpoint], timeout_s: float, timeline: Timeline | None
) -> tuple[list[WeightControl], list[int]]:
    """A `WeightControl` for each engine, and its tensor-parallel size."""
    controls: list[WeightControl] = [backend(e.engine).control(e.url, timeout_s, e.key) for e in engines]
    if timeline is not None:
        controls = [traced(control, timeline) for control in controls]
    return controls, [e.tensor_parallel for e in engines]
