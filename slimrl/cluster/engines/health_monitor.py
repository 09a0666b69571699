"""The health of servers and router: checks of them, and what is told of those that ended, returned or serve.

A server is unhealthy if one of these lasts for the whole `timeout_s`: it does not respond; one of its processes is
stopped, or its actor does not respond; its scheduler writes no statistics and answers no request (ignored during a
weight update, when it may wait for others). A server that is paused or whose memory is released is healthy.
`states_of` reports to the watchdog within seconds, whatever the driver waits for: a training rank that sends weights to
a stopped server can only report its own position.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from slimrl.arguments import Arguments
from slimrl.engines.server_protocol import Router, ServerControl
from slimrl.processes import process_info
from slimrl.weights.update.topology import EngineEndpoint

LONGEST_PAUSE_S = 1.0  # between two checks of a server that may be unhealthy

Result = TypeVar("Result")


class Probeable(Protocol):
    """The part of an engine that a probe uses."""

    @property
    def url(self) -> str | None:
        """Its address, None before it has started."""

    def control(self, timeout_s: float) -> ServerControl:
        """The control client of its server; each call has `timeout_s`."""

    async def stopped(self) -> list[str]:
        """Its stopped processes (SIGSTOP, a debugger), as "name (pid)"."""
        ...


@dataclasses.dataclass(frozen=True)
class HealthConfig:
    """--rollout-health-check-interval, -timeout and -first-wait, in seconds."""

    interval_s: float
    timeout_s: float
    first_wait_s: float

    @classmethod
    def from_args(cls, args: Arguments) -> HealthConfig:
        """From the flags."""
        return cls(
            args.rollout_health_check_interval,
            args.rollout_health_check_timeout,
            args.rollout_health_check_first_wait,
        )


class HealthMonitor:
    """Probes servers from its own threads, so that a hung server blocks nothing else."""

    def __init__(self, flags: HealthConfig, servers: int) -> None:
        self._flags = flags
        self._pool = ThreadPoolExecutor(max_workers=servers + 1, thread_name_prefix="health")
        self._quiet_until = 0.0
        self._weight_updates = 0  # counts begins and ends: odd while an update is in progress

    def generation_begins(self) -> None:
        """Suspends probes for `first_wait_s`."""
        self._quiet_until = time.monotonic() + self._flags.first_wait_s

    @property
    def updating_weights(self) -> bool:
        """Whether a weight update is in progress; set by `EngineRecovery`."""
        return self._weight_updates % 2 == 1

    @updating_weights.setter
    def updating_weights(self, value: bool) -> None:
        self._weight_updates += value != self.updating_weights

    async def wait_unhealthy(self, server: Probeable) -> str:
        """Pending while the server is healthy; then returns the problem."""
        while True:
            await self._pause()
            if (what := await self.probe(server)) is not None:
                return what

    async def wait_router_unhealthy(self, router: Router) -> str:
        """The same for a router."""
        while True:
            await self._pause()
            if (what := await self._lasting(lambda: self._router_unresponsive(router))) is not None:
                return what

    async def wait_hung(self, server: Probeable) -> str:
        """Pending while no process of a starting server is stopped for `timeout_s`; then names those that are."""
        while True:
            await asyncio.sleep(self._flags.interval_s)
            if (what := await self._lasting(lambda: self._stopped_processes(server))) is not None:
                return what

    async def probe(self, server: Probeable) -> str | None:
        """One probe; returns the problem, or None for a healthy server."""
        for check in (self._unresponsive, self._stopped, self._stuck):
            if (what := await self._lasting(functools.partial(check, server))) is not None:
                return what
        return None

    def close(self) -> None:
        """Starts no further probe; running probes end by their own timeout."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _pause(self) -> None:
        await asyncio.sleep(self._flags.interval_s)
        while (left := self._quiet_until - time.monotonic()) > 0:
            await asyncio.sleep(left)

    async def _lasting(self, check: Callable[[], Awaitable[str | None]]) -> str | None:
        """The problem that `check` reports, if it persists for the whole timeout; else None."""
        deadline = time.monotonic() + self._flags.timeout_s
        while (what := await check()) is not None:
            if time.monotonic() >= deadline:
                return f"{what} for {self._flags.timeout_s:g} s (--rollout-health-check-timeout)"
            await asyncio.sleep(min(self._flags.timeout_s / 4, LONGEST_PAUSE_S))
        return None

    async def _unresponsive(self, server: Probeable) -> str | None:
        load = await self._in_thread(server.control(self._flags.timeout_s).load)
        return "has not answered" if load.running is None else None

    async def _stopped(self, server: Probeable) -> str | None:
        try:
            return await asyncio.wait_for(self._stopped_processes(server), self._flags.timeout_s)
        except TimeoutError:
            return "has had an actor that does not respond"

    async def _stopped_processes(self, server: Probeable) -> str | None:
        names = await server.stopped()
        return f"has had stopped processes, {', '.join(names)}," if names else None

    async def _stuck(self, server: Probeable) -> str | None:
        control = server.control(self._flags.timeout_s)
        load = await self._in_thread(control.load)
        if self.updating_weights or load.seconds is None or load.seconds < self._flags.timeout_s:
            return None
        weight_updates = self._weight_updates
        if await self._in_thread(control.scheduler_responds) or weight_updates != self._weight_updates:
            return None
        held = f" with {load.running} requests running and {load.waiting} queued" if load.running else ""
        return f"has had an unresponsive scheduler{held}"

    async def _router_unresponsive(self, router: Router) -> str | None:
        return None if await self._in_thread(router.responds, self._flags.timeout_s) else "has not answered"

    async def _in_thread(self, call: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)


STATE_TIMEOUT_S = 3.0


class Engine(Probeable, Protocol):
    """The part of an engine that `states_of` uses."""

    @property
    def label(self) -> str:
        """Its name in messages."""


async def states_of(engines: Sequence[Engine], router: Router | None = None) -> list[str]:
    """One sentence per server, and for the router, that blocks others; [] if all are healthy."""
    found = await asyncio.gather(*(_state(engine) for engine in engines))
    stopped = [] if router is None or router.pid is None else process_info.stopped_below(router.pid)
    of_router = [f"{router.label} has stopped processes: {_named(stopped)}"] if stopped else []
    return [*of_router, *(sentence for sentence in found if sentence)]


async def _state(engine: Engine) -> str | None:
    if engine.url is None:  # it has not started
        return None
    try:
        stopped = await asyncio.wait_for(engine.stopped(), STATE_TIMEOUT_S)
    except TimeoutError:
        return f"{engine.label} ({engine.url}) does not answer: no reply from its actor"
    except Exception as error:  # a dead actor: its watch reports the cause
        return f"{engine.label} ({engine.url}) cannot be queried: {type(error).__name__}"
    if stopped:
        return f"{engine.label} ({engine.url}) has stopped processes: {_named(stopped)}"
    if (await asyncio.to_thread(engine.control(STATE_TIMEOUT_S).load)).running is None:
        return f"{engine.label} ({engine.url}) does not answer"
    return None


def _named(processes: Sequence[str]) -> str:
    return f"{', '.join(processes)} (SIGSTOP or a debugger: `kill -CONT` lets them continue)"


@dataclasses.dataclass(frozen=True)
class ServerExit:
    """How a process of a server ended; `str()` adds the last lines of its log."""

    what: str
    log_path: Path | None = None
    last_lines: str = ""

    def __str__(self) -> str:
        return self.what if self.log_path is None else f"{self.what}; last lines of {self.log_path}:\n{self.last_lines}"


@dataclasses.dataclass(frozen=True)
class RecoveryEvents:
    """The events after those already received; `serial` counts all events so far."""

    serial: int
    lines: list[str]


@dataclasses.dataclass(frozen=True)
class EngineGroupStatus:
    """Servers that have started and wait for weights, and the number of serving ones."""

    waiting: list[EngineEndpoint]
    serving: int
