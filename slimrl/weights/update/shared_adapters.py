"""Weight updates of an adapter in servers that other runs use, too (--rollout-external-engine-addrs with --lora-rank).

Each version is an adapter of its own name (`models.adapters.SharedAdapter`), loaded beside the one before it. Nothing
is paused, aborted or flushed, and the prefix cache is keyed by the loaded adapter: requests of other runs, and requests
of this run for the version before, are not affected. A version is unloaded at the second update after it, when no
request uses it: SGLang's unload would wait for such a request, and other runs' updates with it. Used by
`adapter_updater`; `engines.shared_adapters` has the calls of the end of a run.
"""

from __future__ import annotations

from collections.abc import Sequence

from slimrl.engines.protocol import EngineError
from slimrl.engines.server_protocol import RunningRequests, WeightControl
from slimrl.models.adapters import SharedAdapter
from slimrl.observability.tracer import Timeline
from slimrl.platform.collective_errors import RankSync
from slimrl.weights.update.engine_fanout import EngineCalls, ServerState, WeightSyncError, call_all


class SharedAdapterCalls(EngineCalls):
    """As `EngineCalls`, without a pause: requests run on."""

    consequence = "and the servers go on with other versions"

    def __init__(
        self,
        servers: Sequence[WeightControl],
        adapter: SharedAdapter,
        rank: int,
        ranks: RankSync,
        timeline: Timeline,
    ) -> None:
        super().__init__(servers, (), rank, ranks, timeline)
        self._adapter = adapter
        self._current: str | None = None  # the adapter that requests name until the update has ended

    def begin(self, running: RunningRequests) -> None:
        """Unloads versions that no request can name any more, whatever `running` is. Raises as `EngineCalls.begin`."""
        self._ranks.run_on_all_ranks(lambda: call_all(self._servers, self._unload_old, "unloading old adapters"))

    def commit_and_resume(self, version: str, running: RunningRequests) -> tuple[str, bool] | None:
        """Checks that every server has the version; raises WeightSyncError on every rank if one does not."""
        name = self._adapter.at(version)
        self._ranks.run_on_all_ranks(lambda: self._check_loaded(name))
        self._current = name
        return None

    def states(self) -> list[ServerState]:
        """Of every server, on every rank, the newest of the run's versions that it has, or why it does not answer."""
        found = self._ranks.run_on_all_ranks(lambda: call_all(self._servers, self._state, "asking for the adapters"))
        return [state for of_rank in found for state in of_rank]

    def _unload_old(self, server: WeightControl) -> None:
        for name, requests in server.adapter_requests().items():
            if name.startswith(self._adapter.prefix) and name != self._current and not requests:
                server.unload_adapter(name)

    def _check_loaded(self, name: str) -> None:
        loaded = call_all(self._servers, lambda server: name in server.adapter_requests(), "asking for the adapters")
        if absent := [server.url for server, there in zip(self._servers, loaded, strict=True) if not there]:
            raise WeightSyncError(f"{', '.join(absent)} no longer have the adapter {name} that was just loaded")

    def _state(self, server: WeightControl) -> ServerState:
        try:
            own = [name for name in server.adapter_requests() if name.startswith(self._adapter.prefix)]
        except EngineError as error:
            return ServerState(server.url, None, str(error))
        versions = (name.removeprefix(self._adapter.prefix) for name in own)
        newest = max(versions, key=lambda version: (len(version), version), default="")
        return ServerState(server.url, newest, None, "runs")
