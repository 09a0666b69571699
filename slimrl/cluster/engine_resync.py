"""Brings weights into servers that were replaced, at the first moment at which the trainers can give them.

The driver's half of `recovery`: whenever the driver waits, it hears what happened to the servers and says so in the
log. While the trainers have nothing else to do, and hold the weights that the other servers work with, a new server is
given them at once; else it joins with the next weight update. Where no server is left that works, the trainers are
woken up for it. A weight update in which a server is lost is made again without that one. Used by `Run`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray import ObjectRef

from slimrl.cluster.engines.engine_recovery import EngineGroupStatus, RecoveryEvents
from slimrl.cluster.supervisor import Supervisor
from slimrl.cluster.training.train_group import RankFailedError, TrainGroup
from slimrl.cluster.watchdog import WaitTarget
from slimrl.weights.update.topology import EngineEndpoint

logger = logging.getLogger("slimrl")


class EngineResync:
    """Implements `supervise.EventHandler`. `trainers` is None where nobody trains."""

    def __init__(
        self,
        ask: Callable[..., ObjectRef],
        where: Callable[[str], WaitTarget],
        supervisor: Supervisor,
        trainers: TrainGroup | None,
        connected: list[EngineEndpoint],
    ) -> None:
        """`ask(method, *arguments)` calls a method of the rollout manager's `EngineRecovery`; `where` describes the
        wait.

        `connected` are the servers to which the trainers can update already.
        """
        self._ask, self._where = ask, where
        self._supervisor = supervisor
        self._trainers = trainers
        self._connected = connected
        self._serial = 0
        self._news: ObjectRef | None = None
        self._idle: Callable[[EngineGroupStatus], None] | None = None

    def news(self) -> ObjectRef:
        """Ready when something has happened."""
        if self._news is None:
            self._news = self._ask("news", self._serial)
        return self._news

    def act(self) -> None:
        """Says what has happened, and gives weights to the servers that wait for them, if this is the moment."""
        news: RecoveryEvents = ray.get(self._news)
        self._news, self._serial = None, news.serial
        for line in news.lines:
            logger.warning("%s", line)
        self._serve_the_waiting()

    @contextlib.contextmanager
    def trainer_idle(self, version: int | None, rescue: Callable[[], None]) -> Iterator[None]:
        """The trainers have nothing to do in this block.

        `version` is that of the weights which they hold, None where they sleep or hold others than the servers.
        `rescue()` updates all servers then, and is called when none works any more.
        """

        def serve(standing: EngineGroupStatus) -> None:
            if version is not None:
                self._update_weights(version, self._update, only_waiting=True)
            elif standing.serving == 0:
                rescue()

        self._idle = serve
        try:
            self._serve_the_waiting()
            yield
        finally:
            self._idle = None

    def sync_weights(self, version: int, update: Callable[[int], Any]) -> None:
        """Brings weights to every server that is there, by `update(version)`; none has to be there yet."""
        with self._busy():
            self._update_weights(version, update, only_waiting=False)

    def _serve_the_waiting(self) -> None:
        if self._idle is None or self._trainers is None:
            return
        with self._busy() as serve:
            heard = -1
            while heard != self._serial:  # what was heard of meanwhile was not acted upon
                heard = self._serial
                standing: EngineGroupStatus = self._get("standing", what="the standing of the servers")
                if standing.waiting and serve is not None:
                    serve(standing)

    @contextlib.contextmanager
    def _busy(self) -> Iterator[Callable[[EngineGroupStatus], None] | None]:
        """News that come in this block are only said: an update within an update would meet servers that serve
        already.
        """
        idle, self._idle = self._idle, None
        try:
            yield idle
        finally:
            self._idle = idle

    def _update(self, version: int) -> None:
        assert self._trainers is not None
        self._trainers.update_weights(version)

    def _update_weights(self, version: int, update: Callable[[int], Any], *, only_waiting: bool) -> None:
        while endpoints := self._get("begin_weight_update", only_waiting, what=f"a server for weights {version}"):
            urls = [endpoint.url for endpoint in endpoints]
            try:
                if endpoints != self._connected:
                    self._connected = []
                    assert self._trainers is not None
                    self._trainers.connect_engines(endpoints)
                    self._connected = endpoints
                update(version)
            except RankFailedError as error:
                self._connected = []  # what was joined has to be joined again, even by the same servers
                lost = self._get("weight_update_failed", urls, what="the servers of a weight update that failed")
                if not lost:
                    raise
                reason = str(error).split("\n", 1)[0]
                logger.warning(
                    "the weight update %s lost %s and begins again without: %s", version, ", ".join(lost), reason
                )
                continue
            self._get("end_weight_update", urls, str(version), what=f"the servers continuing with weights {version}")
            return

    def _get(self, method: str, *arguments: Any, what: str) -> Any:
        return self._supervisor.get([self._ask(method, *arguments)], self._where(what))[0]
