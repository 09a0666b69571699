"""Weight updates of LoRA adapters beside the base that the servers have (--lora-rank without --lora-merge).

The first update compares the servers' weights, which come from --hf-checkpoint, with the base of --ref-load: an adapter
on another base is another model, and nothing else would show it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from slimrl.engines.server_protocol import RunningRequests
from slimrl.models.adapters import AdapterConfig, AdapterMapping
from slimrl.models.families import family_for
from slimrl.models.model_spec import ModelSpec
from slimrl.models.peft_config import peft_config
from slimrl.observability.tracer import Timeline
from slimrl.platform.collective_errors import RANK_ZERO
from slimrl.weights.hf_checkpoint import read_hf_config
from slimrl.weights.update.engine_fanout import WeightsDifferError, WeightSyncError, connect
from slimrl.weights.update.topology import EngineEndpoint, RankGroups
from slimrl.weights.update.transport_adapter import AdapterTransport
from slimrl.weights.update.transport_delta import DeltaUpdater
from slimrl.weights.update.weight_updater import TIMEOUT_S, ModelSource, WeightUpdater

if TYPE_CHECKING:
    from slimrl.arguments import Arguments


def create_updater(
    args: Arguments, parallel: RankGroups, engines: Sequence[EngineEndpoint], timeline: Timeline | None = None
) -> WeightUpdater:
    """The updater for the flags; collective over all trainer ranks."""
    adapters = AdapterConfig.from_args(args)
    if adapters is None or args.lora_merge:
        kind = DeltaUpdater if args.update_weight_mode == "delta" else WeightUpdater
        return kind.create(args, parallel, engines, timeline=timeline)
    family, spec = family_for(read_hf_config(Path(args.hf_checkpoint))), ModelSpec.from_args(args)
    base = ModelSource(spec, family, parallel, merge_adapters=False)
    return AdapterUpdater(base, adapters, engines, args.update_weight_buffer_size, timeline=timeline)


class AdapterUpdater(WeightUpdater):
    """Created collectively over all trainer ranks."""

    def __init__(
        self,
        base: ModelSource,
        adapters: AdapterConfig,
        engines: Sequence[EngineEndpoint],
        bucket_bytes: int,
        *,
        timeout_s: float = TIMEOUT_S,
        timeline: Timeline | None = None,
    ) -> None:
        """`base` describes the weights without the adapters."""
        servers, sizes = connect(engines, timeout_s, timeline)
        transports = []
        if base.parallel.rank == RANK_ZERO:
            transports.append(AdapterTransport(servers, sizes, peft_config(adapters), base.parallel.device))
        source = dataclasses.replace(base, family=AdapterMapping.of(base.family, adapters))
        super().__init__(source, servers, sizes, transports, {RANK_ZERO}, bucket_bytes, timeline=timeline)
        self._base = base
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
