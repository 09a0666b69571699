"""Keeps the router alive and its list of servers right, whatever happens to either (`--use-fault-tolerance`).

Promises that a router which dies or hangs is started again at its address with the servers that serve then, and that a
change which failed is made good later. Used by `recovery`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from slimrl.cluster.engines.engine_group import POLL_INTERVAL_S, ROUTER_READY_TIMEOUT_S
from slimrl.cluster.engines.health_monitor import HealthMonitor
from slimrl.engines.protocol import EngineError
from slimrl.engines.sglang.router import ExternalRouter, RouterProcess
from slimrl.processes import ProcessStartError

logger = logging.getLogger(__name__)

MAX_LOSSES = 3  # in a row
SETTLE_TIMEOUT_S = 10.0  # for the router to take a server in; one that dies meanwhile never comes
SETTLE_INTERVAL_S = 5.0
LONG_LIFE_S = 600.0  # of a router whose loss does not count with those before it
RESTART_PAUSE_S = 5.0  # after a start that failed: whoever took its port may give it back


class RouterSupervisor:
    """`serving()` are the addresses that the router is to know; `tell(line)` is called for every event."""

    def __init__(
        self,
        router: RouterProcess | ExternalRouter,
        monitor: HealthMonitor,
        serving: Callable[[], list[str]],
        tell: Callable[[str], None],
    ) -> None:
        self.losses = 0  # in a row: since the last complete rollout, or a long life
        self._router, self._monitor = router, monitor
        self._serving, self._tell = serving, tell
        self._first_log = router.log_path  # None: a router of the user's, which its owner starts again
        self._life = 0
        self._restarts = 0
        self._turn = asyncio.Lock()

    def take_restarts(self) -> int:
        """How often it was started again since this was asked last."""
        restarts, self._restarts = self._restarts, 0
        return restarts

    async def keep(self) -> str:
        """Starts the router again each time that it is lost; returns why that makes no more sense."""
        name, settling = f"the SGLang router ({self._router.url})", asyncio.ensure_future(self._settle_for_ever())
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
                self._tell(f"{name} {what}{log}; it is started again")
                async with self._turn:
                    try:
                        await asyncio.to_thread(self._restart)
                    except (ProcessStartError, EngineError) as error:
                        port = self._router.port
                        self._tell(f"{name} did not start, maybe because its port {port} is taken: {error}")
                        await asyncio.sleep(RESTART_PAUSE_S)
                        continue
                self._restarts += 1
                await self.settle()
                self._tell(f"{name} is back with {len(self._serving())} servers")
        finally:
            settling.cancel()

    async def settle(self) -> bool:
        """Makes the router know exactly the servers that serve; False where that must be tried again."""
        async with self._turn:
            try:
                return await asyncio.to_thread(self._settle)
            except (EngineError, ProcessStartError) as error:
                logger.info("the router's list of servers is not right yet: %s", error)
                return False

    async def _settle_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SETTLE_INTERVAL_S)
            await self.settle()

    async def _loss(self) -> str:
        """Pending while the router lives and is well."""
        wait_unhealthy = asyncio.ensure_future(self._monitor.router_illness(self._router.url))
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

    def _settle(self) -> bool:
        wanted = set(self._serving())
        known = {worker["url"] for worker in self._router.workers()}
        for url in known - wanted:
            self._router.remove_worker(url)
        for url in wanted - known:
            self._router.add_worker(url)
        if wanted - known:
            self._router.wait_ready(len(wanted), SETTLE_TIMEOUT_S)
        return True
