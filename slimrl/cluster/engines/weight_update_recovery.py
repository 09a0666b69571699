"""Weight updates after a lost server: retries without it, and sends weights to its replacement.

The driver's half of `engine_recovery`: whenever the driver waits, it receives and logs the events of the servers. If
the trainers are idle and hold the version that the other servers have, a new server gets it immediately; otherwise it
joins with the next weight update. If no server is left, the trainers are onloaded for the update. A weight update in
which a server is lost is retried without it. Used by `Run`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray import ObjectRef

from slimrl.arguments import Arguments
from slimrl.cluster.engines.health_monitor import EngineGroupStatus, RecoveryEvents
from slimrl.cluster.nodes.watch import SpareNodes
from slimrl.cluster.rollout_manager_proxy import RolloutManagerProxy
from slimrl.cluster.supervisor import Supervisor
from slimrl.cluster.training.train_recovery import Trainers
from slimrl.cluster.training.train_worker import RankFailedError
from slimrl.weights.update.topology import EngineEndpoint

logger = logging.getLogger("slimrl")


class WeightUpdateRecovery:
    """Implements `supervisor.EventHandler`. `trainers` is None if the run does not train."""

    def __init__(
        self,
        manager: RolloutManagerProxy,
        supervisor: Supervisor,
        trainers: Trainers | None,
        connected: list[EngineEndpoint],
        follow_servers: Callable[[], None] = lambda: None,
    ) -> None:
        """`connected` are the servers that the trainers are already connected to.

        `follow_servers` is called after each event, for servers on other nodes than before.
        """
        self._follow_servers = follow_servers
        self._manager = manager
        self._supervisor = supervisor
        self._trainers = trainers
        self._connected = connected
        self._serial = 0
        self._pending_events: ObjectRef | None = None
        self._idle: Callable[[EngineGroupStatus], None] | None = None

    def events(self) -> ObjectRef:
        """Ready when there are new events."""
        if self._pending_events is None:
            self._pending_events = self._manager.engine_events(self._serial)
        return self._pending_events

    def handle_events(self) -> None:
        """Logs the new events, and updates waiting servers if the trainers are idle."""
        events: RecoveryEvents = ray.get(self._pending_events)
        self._pending_events, self._serial = None, events.serial
        for line in events.lines:
            logger.warning("%s", line)
        self._follow_servers()
        self._update_waiting()

    @contextlib.contextmanager
    def trainer_idle(self, version: int | None, update_all: Callable[[], None]) -> Iterator[None]:
        """Declares the trainers idle within the block.

        `version` is the version of their weights, None if they are offloaded or hold other weights than the servers. In
        that case waiting servers are updated only when none serves any more, by `update_all()`.
        """

        def update(status: EngineGroupStatus) -> None:
            if version is not None:
                self._update_weights(version, self._update, only_waiting=True)
            elif status.serving == 0:
                update_all()

        self._idle = update
        try:
            self._update_waiting()
            yield
        finally:
            self._idle = None

    def sync_weights(self, version: int, update: Callable[[int], Any]) -> None:
        """Sends weights to every present server by `update(version)`; waits for the first server if there is none."""
        with self._busy():
            self._update_weights(version, update, only_waiting=False)

    def _update_waiting(self) -> None:
        if self._idle is None or self._trainers is None:
            return
        with self._busy() as update:
            handled = -1
            while handled != self._serial:  # events that arrived meanwhile were only logged
                handled = self._serial
                status: EngineGroupStatus = self._get(self._manager.engine_status(), "the status of the servers")
                if status.waiting and update is not None:
                    update(status)

    @contextlib.contextmanager
    def _busy(self) -> Iterator[Callable[[EngineGroupStatus], None] | None]:
        """Events in this block are only logged: a nested weight update would include servers that already serve."""
        idle, self._idle = self._idle, None
        try:
            yield idle
        finally:
            self._idle = idle

    def _update(self, version: int) -> None:
        assert self._trainers is not None
        self._trainers.update_weights(version)

    def _update_weights(self, version: int, update: Callable[[int], Any], *, only_waiting: bool) -> None:
        while endpoints := self._get(
            self._manager.begin_weight_update(only_waiting), f"a server for weights {version}"
        ):
            urls = [endpoint.url for endpoint in endpoints]
            try:
                if endpoints != self._connected:
                    self._connected = []
                    assert self._trainers is not None
                    self._trainers.connect_engines(endpoints)
                    self._connected = endpoints
                update(version)
            except RankFailedError as error:
                self._connected = []  # even the same servers must reconnect
                lost = self._get(self._manager.weight_update_failed(urls), "the servers of a weight update that failed")
                if not lost:
                    raise
                reason = str(error).split("\n", 1)[0]
                logger.warning(
                    "weight update %s failed: %s; retrying without the lost servers %s",
                    version,
                    reason,
                    ", ".join(lost),
                )
                continue
            ended = self._manager.end_weight_update(urls, str(version))
            self._get(ended, f"the servers continuing with weights {version}")
            return

    def _get(self, ref: ObjectRef, what: str) -> Any:
        return self._supervisor.get([ref], self._manager.waiting_for(what))[0]


def weight_recovery(
    args: Arguments,
    manager: RolloutManagerProxy,
    supervisor: Supervisor,
    trainers: Trainers | None,
    endpoints: list[EngineEndpoint],
    spares: SpareNodes,
) -> WeightUpdateRecovery | None:
    """The object that sends weights to replaced servers; None without `--use-fault-tolerance` or without servers."""
    if not args.use_fault_tolerance or not endpoints:
        return None
    spares.allow_of_servers()
    recovery = WeightUpdateRecovery(manager, supervisor, trainers, endpoints, spares.follow_servers)
    supervisor.set_event_handler(recovery)
    return recovery
