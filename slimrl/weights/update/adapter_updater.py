"""Weight updates of LoRA adapters beside the base that the servers have (--lora-rank without --lora-merge).

The first update compares the servers' weights, which come from --hf-checkpoint, with the base of --ref-load: an adapter
on another base is another model, and nothing else would show it.

`AdapterTransport` sends the adapters' values in one HTTP call to each server, which keeps its own base: an update has a
few megabytes for a model of many gigabytes. Requests name the adapter (--lora-name); others use the base.

In external servers, which other runs use, too, each version is an adapter of its own name
(`models.adapters.SharedAdapter`), loaded beside the one before it (`SharedAdapterCalls`). Nothing is paused, aborted or
flushed, and the prefix cache is keyed by the loaded adapter: requests of other runs, and requests of this run for the
version before, are not affected. A version is unloaded at the second update after it, when no request uses it: SGLang's
unload would wait for such a request, and other runs' updates with it. `engines.shared_adapters` has the calls of the
end of a run.

`create_updater` chooses the updater of a run.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slimrl.engines.protocol import EngineError
from slimrl.engines.server_protocol import RunningRequests, WeightControl
from slimrl.engines.shared_adapters import wait_until_unused
from slimrl.models.adapters import ADAPTER_NAME, AdapterConfig, AdapterMapping, SharedAdapter, peft_config
from slimrl.models.families import family_for
from slimrl.models.model_spec import ModelSpec
from slimrl.observability.tracer import Timeline
from slimrl.platform.collective_errors import RANK_ZERO, RankSync
from slimrl.weights.hf_checkpoint import read_hf_config
from slimrl.weights.point_to_point.updater import PointToPointUpdater
from slimrl.weights.update.buckets import Bucket, Entry, ReusedBuffer
from slimrl.weights.update.engine_fanout import (
    EngineCalls,
    ServerState,
    WeightsDifferError,
    WeightSyncError,
    call_all,
    connect,
)
from slimrl.weights.update.topology import EngineEndpoint, RankGroups
from slimrl.weights.update.transport_delta import DeltaUpdater
from slimrl.weights.update.transport_tensor import Rebuilt, described
from slimrl.weights.update.weight_updater import TIMEOUT_S, ModelSource, WeightUpdater

if TYPE_CHECKING:
    from slimrl.arguments import Arguments


class AdapterTransport:
    """Trainer rank 0 collects the buckets and sends all of them to every server with the last one."""

    def __init__(
        self,
        servers: Sequence[WeightControl],
        engine_sizes: Sequence[int],
        config: dict[str, Any],
        device: torch.device,
    ) -> None:
        """`engine_sizes` are the servers' tensor-parallel sizes; `config` is PEFT's of the adapters."""
        self.buffer = ReusedBuffer(device)
        self.with_checksums = False  # whether each server compares SHA-256 of its tensors
        self.name = ADAPTER_NAME  # of the adapter that the next update loads
        self.waits_for_requests = False  # before it replaces an adapter; servers that are paused have none
        self._servers = list(servers)
        self._sizes = {server.url: size for server, size in zip(servers, engine_sizes, strict=True)}
        self._config = config
        self._entries: list[Entry] = []
        self._data = bytearray()

    def start(self, bucket: Bucket) -> None:
        """Keeps the bucket; the last one is sent with all others. Raises WeightSyncError naming each failed server."""
        offset = len(self._data)
        for entry in bucket.entries:
            self._entries.append(dataclasses.replace(entry, start=entry.start + offset, end=entry.end + offset))
        self._data += bucket.flat.cpu().numpy().data
        if not bucket.last:
            return
        payload, checksums = serialize(self._entries, self._data), None
        if self.with_checksums:
            parts = {entry.name: self._data[entry.start : entry.end] for entry in self._entries}
            checksums = {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()}
        self.reset()
        call_all(self._servers, lambda server: self._load(server, payload, checksums), "loading adapters")

    def _load(self, server: WeightControl, payload: str, checksums: dict[str, str] | None) -> None:
        if self.waits_for_requests:
            wait_until_unused(server, self.name)
        server.load_adapter(self.name, self._config, [payload] * self._sizes[server.url], checksums)

    def opens(self, tensor: torch.Tensor) -> bool:
        """See `Transport.opens`."""
        return False

    def finish(self) -> None:
        """Does nothing: `start` returns when every server has the adapter."""

    def release(self) -> None:
        """Does nothing: engines with pipeline stages do not use this transport."""

    def reset(self) -> None:
        """Drops the buckets of an update."""
        self._entries, self._data = [], bytearray()

    def close(self) -> None:
        """Does nothing: nothing stays open between updates."""

    def leave(self) -> None:
        """Does nothing: there are no process groups."""


def serialize(entries: Sequence[Entry], data: bytearray) -> str:
    """SGLang's "flattened_bucket" payload with the values themselves: a pickle in base64."""
    flat = Rebuilt(functools.partial(torch.frombuffer, dtype=torch.uint8), (data,))
    payload = {"flattened_tensor": flat, "metadata": [described(entry) for entry in entries]}
    return base64.b64encode(pickle.dumps(payload, protocol=5)).decode("ascii")


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


def create_updater(
    args: Arguments, parallel: RankGroups, engines: Sequence[EngineEndpoint], timeline: Timeline | None = None
) -> WeightUpdater:
    """The updater for the flags; collective over all trainer ranks."""
    adapters = AdapterConfig.from_args(args)
    whole = adapters is None or args.lora_merge
    if whole and args.update_weight_transfer_mode != "p2p":
        kind = DeltaUpdater if args.update_weight_mode == "delta" else WeightUpdater
        return kind.create(args, parallel, engines, timeline=timeline)
    family, spec = family_for(read_hf_config(Path(args.hf_checkpoint))), ModelSpec.from_args(args)
    if adapters is None or args.lora_merge:
        return PointToPointUpdater(
            ModelSource(spec, family, parallel),
            engines,
            transport=args.update_weight_transport,
            bucket_bytes=args.update_weight_buffer_size,
            timeline=timeline,
        )
    base = ModelSource(spec, family, parallel, merge_adapters=False)
    name = args.shared_adapter or args.lora_name
    return AdapterUpdater(base, adapters, engines, args.update_weight_buffer_size, name, timeline=timeline)


class AdapterUpdater(WeightUpdater):
    """Created collectively over all trainer ranks."""

    def __init__(
        self,
        base: ModelSource,
        adapters: AdapterConfig,
        engines: Sequence[EngineEndpoint],
        bucket_bytes: int,
        name: str | SharedAdapter = ADAPTER_NAME,
        *,
        timeout_s: float = TIMEOUT_S,
        timeline: Timeline | None = None,
    ) -> None:
        """`base` describes the weights without the adapters; `name` is theirs in the engines."""
        servers, sizes = connect(engines, timeout_s, timeline)
        transports = []
        if base.parallel.rank == RANK_ZERO:
            transports.append(AdapterTransport(servers, sizes, peft_config(adapters), base.parallel.device))
        source = dataclasses.replace(base, family=AdapterMapping.of(base.family, adapters))
        super().__init__(source, servers, sizes, transports, {RANK_ZERO}, bucket_bytes, timeline=timeline)
        self._base = base
        self._name = name
        if isinstance(name, SharedAdapter):
            self._calls = SharedAdapterCalls(servers, name, base.parallel.rank, self._ranks, self._timeline)
        self._adapter_transports = transports
        self._base_is_equal = False

    def _attempt(
        self, model: nn.Module | Sequence[nn.Module], version: str, check_equal: bool, running: RunningRequests
    ) -> tuple[tuple[int, int], float, tuple[str, bool] | None]:
        if not self._base_is_equal:
            self._ranks.run_on_all_ranks(lambda: self._check_base(model))
            self._base_is_equal = True
        for transport in self._adapter_transports:
            transport.with_checksums = check_equal
            transport.name = self._name.at(version) if isinstance(self._name, SharedAdapter) else self._name
            transport.waits_for_requests = isinstance(self._name, SharedAdapter)
        return super()._attempt(model, version, check_equal, running)

    def _check_equal(self, model: nn.Module | Sequence[nn.Module]) -> None:
        """Compares the base; the servers have compared the adapter's checksums when they loaded it."""
        self._compare(model, self._base)

    def _check_base(self, model: nn.Module | Sequence[nn.Module]) -> None:
        try:
            self._compare(model, self._base)
        except WeightsDifferError as error:
            raise WeightSyncError(
                f"the servers have the weights of --hf-checkpoint, and the adapters are trained on those of --ref-load:"
                f" make them equal, or give --lora-merge ({error})",
                final=True,
            ) from error
