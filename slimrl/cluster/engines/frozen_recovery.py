"""Replaces lost servers and routers of frozen models, beside those of the policy (`--use-fault-tolerance`).

A replaced server has the model, options and GPUs of the lost one. It needs no weights, so it serves as soon as it has
started. The events of all models reach the driver in one list. Created by the rollout manager.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from slimrl.cluster.engines.engine_group import EngineGroup
from slimrl.cluster.engines.engine_recovery import EngineRecovery
from slimrl.cluster.engines.frozen_models import FrozenModels
from slimrl.cluster.engines.health_monitor import HealthConfig
from slimrl.engines.protocol import ServerList
from slimrl.engines.server_protocol import EngineMemory


@dataclasses.dataclass
class OwnCalls:
    """In place of a client: custom functions call the router of a frozen model themselves."""

    server_urls: list[str] = dataclasses.field(default_factory=list)
    resent: int = 0

    def set_concurrency(self, requests: int) -> None:
        """Does nothing: custom functions decide how many requests they send."""


class FrozenRecovery(EngineRecovery):
    """Supervises the servers and the router of one frozen model."""

    def __init__(
        self, flags: HealthConfig, group: EngineGroup, memory: EngineMemory, report: Callable[[str], None]
    ) -> None:
        """`report(line)` is called for every event."""
        self._report = report
        super().__init__(flags, group, OwnCalls(), memory, needs_weight_sync=False, concurrency=0)

    def _event(self, line: str) -> None:
        self._report(line)
        self._notify()


class RunRecovery(EngineRecovery):
    """The recovery of the policy's engines, which also begins, counts and ends that of the frozen models."""

    def __init__(
        self,
        flags: HealthConfig,
        group: EngineGroup,
        client: ServerList,
        memory: EngineMemory,
        frozen: FrozenModels,
        **options: Any,
    ) -> None:
        """As `EngineRecovery`; takes over the watch of the frozen models too."""
        super().__init__(flags, group, client, memory, **options)
        frozen.recoveries = {
            name: FrozenRecovery(flags, own, frozen.gpu_memory[name], self._event)
            for name, own in frozen.groups.items()
        }
        self._of_frozen = list(frozen.recoveries.values())

    def generation_begins(self) -> None:
        """As `EngineRecovery`."""
        super().generation_begins()
        for recovery in self._of_frozen:
            recovery.generation_begins()

    async def generation_ends(self) -> None:
        """As `EngineRecovery`."""
        await super().generation_ends()
        for recovery in self._of_frozen:
            await recovery.generation_ends()

    def take_metrics(self) -> dict[str, float]:
        """The fault counts of all models since the previous call."""
        counts = super().take_metrics()
        for recovery in self._of_frozen:
            counts = {name: counts[name] + more for name, more in recovery.take_metrics().items()}
        return counts

    async def close(self) -> None:
        """As `EngineRecovery`."""
        for recovery in self._of_frozen:
            await recovery.close()
        await super().close()
