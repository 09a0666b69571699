"""Restarts a lost router and keeps its list of servers correct (`--use-fault-tolerance`).

A router that dies or hangs restarts at its address with the serving servers. Failed changes of its list are retried.
Used by `engine_recovery`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from slimrl.cluster.engines.engine_group import POLL_INTERVAL_S, ROUTER_READY_TIMEOUT_S, AnyEngine
from slimrl.cluster.engines.health_monitor import HealthMonitor
from slimrl.engines.protocol import EngineError
from slimrl.engines.server_protocol import Router
from slimrl.processes import ProcessStartError

logger = logging.getLogger(__name__)

MAX_LOSSES = 3  # consecutive
SETTLE_TIMEOUT_S = 10.0  # for the router to admit a server; a server that dies meanwhile is never admitted
SETTLE_INTERVAL_S = 5.0
LONG_LIFE_S = 600.0  # a router that lived this long resets the count of consecutive losses
RESTART_PAUSE_S = 5.0  # after a failed start: the process that took its port may release it


class Servers(Protocol):
    """An `EngineGroup`, or servers that clients call themselves, without a router."""

    @property
    def engines(self) -> list[Any]:
        """The engines of the run, and those that join later."""

    @property
    def router(self) -> Router | None:
        """The router in front of them."""

    def replace_engine(self, index: int) -> AnyEngine:
        """As `EngineGroup.replace_engine`."""


class NoRouter:
    """In place of a `RouterSupervisor`, without a router."""

    losses = 0

    def take_restarts(self) -> int:
        """None."""
        return 0

    async def supervise(self) -> str:
        """Never returns."""
        return await asyncio.Future()

    async def sync_workers(self) -> bool:
        """Has nothing to do."""
        return True


class RouterSupervisor:
    """`serving()` returns the URLs that the router must have; `report(line)` is called for every event."""

    def __init__(
        self,
        router: Router,
        monitor: HealthMonitor,
        serving: Callable[[], list[str]],
        report: Callable[[str], None],
    ) -> None:
        self.losses = 0  # consecutive: since the last complete rollout or LONG_LIFE_S
        self._router, self._monitor = router, monitor
        self._serving, self._report = serving, report
        self._first_log = router.log_path  # None for an external router, which its owner restarts
        self._life = 0
        self._restarts = 0
        self._lock = asyncio.Lock()

    def take_restarts(self) -> int:
        """The number of restarts since the previous call."""
        restarts, self._restarts = self._restarts, 0
        return restarts

    async def supervise(self) -> str:
        """Restarts the router each time it is lost; returns the reason when it gives up."""
        name, sync_task = f"{self._router.label} ({self._router.url})", asyncio.ensure_future(self._sync_loop())
        try:
            while True:
                since = time.monotonic()
                what = await self._loss()
                self.losses = 1 if time.monotonic() - since >= LONG_LIFE_S else self.losses + 1
                if self.losses >= MAX_LOSSES:
                    why = (
                        f"it was lost {self.losses} times without a complete rollout, or {LONG_LIFE_S:g} s, in between"
                    )
                    return f"{name} {what}; last lines of its log:\n{self._router.last_log_lines(20)}\n{why}"
                log = f" (log: {self._router.log_path})" if self._router.log_path is not None else ""
                self._report(f"{name} {what}{log}; it is being restarted")
                async with self._lock:
                    try:
                        await asyncio.to_thread(self._restart)
                    except (ProcessStartError, EngineError) as error:
                        port = self._router.port
                        self._report(f"{name} did not start, maybe because its port {port} is taken: {error}")
                        await asyncio.sleep(RESTART_PAUSE_S)
                        continue
                self._restarts += 1
                await self.sync_workers()
                self._report(f"{name} is back with {len(self._serving())} servers")
        finally:
            sync_task.cancel()

    async def sync_workers(self) -> bool:
        """Makes the router's list equal to the serving servers; returns False if that must be retried."""
        async with self._lock:
            try:
                return await asyncio.to_thread(self._sync_workers)
            except (EngineError, ProcessStartError) as error:
                logger.info("the router's servers are not in sync yet: %s", error)
                return False

    async def _sync_loop(self) -> None:
        while True:
            await asyncio.sleep(SETTLE_INTERVAL_S)
            await self.sync_workers()

    async def _loss(self) -> str:
        """Pending while the router is alive and healthy; then returns how it was lost."""
        wait_unhealthy = asyncio.ensure_future(self._monitor.wait_router_unhealthy(self._router))
        try:
            while (code := self._router.poll()) is None and not wait_unhealthy.done():
                await asyncio.sleep(POLL_INTERVAL_S)
            return wait_unhealthy.result() if code is None else f"died with exit code {code}"
        finally:
            wait_unhealthy.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await wait_unhealthy

    def _restart(self) -> None:
        self._life += 1
        first = self._first_log
        log = None if first is None else first.with_name(f"{first.stem}.{self._life}{first.suffix}")
        self._router.restart(log)
        self._router.wait_alive(ROUTER_READY_TIMEOUT_S)

    def _sync_workers(self) -> bool:
        wanted = set(self._serving())
        known = set(self._router.server_urls())
        for url in known - wanted:
            self._router.remove_worker(url)
        self._router.add_workers(sorted(wanted - known))
        if wanted - known:
            self._router.wait_ready(len(wanted), SETTLE_TIMEOUT_S)
        return True


def router_supervisor(
    router: Router | None, monitor: HealthMonitor, serving: Callable[[], list[str]], report: Callable[[str], None]
) -> RouterSupervisor | NoRouter:
    """As `RouterSupervisor`, also for servers without a router."""
    return NoRouter() if router is None else RouterSupervisor(router, monitor, serving, report)
