"""Health checks of servers and router: which are unhealthy, and which keep the run waiting.

A server is unhealthy when one of these lasts for the whole `timeout_s`: it does not answer; one of its processes is
stopped, or the actor that would know does not answer; its scheduler gives no sign of life and answers no question
(except in a weight update, when it may wait for others). A server that is paused, or whose memory is released, is
healthy.
`states_of` answers the watchdog within seconds, whatever the driver waits for: a training rank that sends weights to a
stopped server only reports where it waits itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from slimrl.arguments import Arguments
from slimrl.engines.http import answers
from slimrl.engines.sglang.control import load_of
from slimrl.processes import process_info

LONGEST_PAUSE_S = 1.0  # between two looks at a server that may be ill

Answer = TypeVar("Answer")


class Probeable(Protocol):
    """What a probe needs of an engine."""

    @property
    def url(self) -> str | None:
        """Its address, None before it has started."""

    async def stopped(self) -> list[str]:
        """Its processes that the kernel has stopped."""
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
    """Probes servers from threads of its own, so that servers that hang keep nobody else's work."""

    def __init__(self, flags: HealthConfig, servers: int, key: str | None = None) -> None:
        self._flags = flags
        self._key = key
        self._pool = ThreadPoolExecutor(max_workers=servers + 1, thread_name_prefix="health")
        self._quiet_until = 0.0
        self._weight_updates = 0  # begun or ended: even while none is in progress

    def generation_begins(self) -> None:
        """From now on no probe begins for `first_wait_s`."""
        self._quiet_until = time.monotonic() + self._flags.first_wait_s

    @property
    def updating_weights(self) -> bool:
        """Whether weights are in flight; set it when that begins and ends."""
        return self._weight_updates % 2 == 1

    @updating_weights.setter
    def updating_weights(self, value: bool) -> None:
        self._weight_updates += value != self.updating_weights

    async def wait_unhealthy(self, server: Probeable) -> str:
        """Pending while the server is well; then what is wrong with it."""
        while True:
            await self._pause()
            if (what := await self.probe(server)) is not None:
                return what

    async def router_illness(self, url: str) -> str:
        """The same for a router."""
        while True:
            await self._pause()
            if (what := await self._lasting(lambda: self._router_silent(url))) is not None:
                return what

    async def wait_hung(self, server: Probeable) -> str:
        """Pending while no process of a server that is starting is stopped for too long; then which."""
        while True:
            await asyncio.sleep(self._flags.interval_s)
            if (what := await self._lasting(lambda: self._stopped_processes(server))) is not None:
                return what

    async def probe(self, server: Probeable) -> str | None:
        """One probe: None where the server is well."""
        for look in (self._silent, self._stopped, self._stuck):
            if (what := await self._lasting(functools.partial(look, server))) is not None:
                return what
        return None

    def close(self) -> None:
        """Begins no further probe; those in progress end with their own time limit."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _pause(self) -> None:
        await asyncio.sleep(self._flags.interval_s)
        while (left := self._quiet_until - time.monotonic()) > 0:
            await asyncio.sleep(left)

    async def _lasting(self, look: Callable[[], Awaitable[str | None]]) -> str | None:
        """What `look` finds, where it finds something for the whole time limit."""
        deadline = time.monotonic() + self._flags.timeout_s
        while (what := await look()) is not None:
            if time.monotonic() >= deadline:
                return f"{what} for {self._flags.timeout_s:g} s (--rollout-health-check-timeout)"
            await asyncio.sleep(min(self._flags.timeout_s / 4, LONGEST_PAUSE_S))
        return None

    async def _silent(self, server: Probeable) -> str | None:
        load = await self._ask(load_of, server.url, self._flags.timeout_s, self._key)
        return "has not answered" if load.running is None else None

    async def _stopped(self, server: Probeable) -> str | None:
        try:
            return await asyncio.wait_for(self._stopped_processes(server), self._flags.timeout_s)
        except TimeoutError:
            return "has had an actor that does not answer"

    async def _stopped_processes(self, server: Probeable) -> str | None:
        names = await server.stopped()
        return f"has had stopped processes, {', '.join(names)}," if names else None

    async def _stuck(self, server: Probeable) -> str | None:
        load = await self._ask(load_of, server.url, self._flags.timeout_s, self._key)
        if self.updating_weights or load.seconds is None or load.seconds < self._flags.timeout_s:
            return None
        weight_updates = self._weight_updates
        if (
            await self._ask(answers, f"{server.url}/server_info", self._flags.timeout_s, self._key)
            or weight_updates != self._weight_updates
        ):
            return None
        held = f" with {load.running} requests running and {load.waiting} queued" if load.running else ""
        return f"has had a scheduler without a sign of life{held}"

    async def _router_silent(self, url: str) -> str | None:
        return None if await self._ask(answers, f"{url}/health", self._flags.timeout_s) else "has not answered"

    async def _ask(self, call: Callable[..., Answer], *arguments: Any) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)


LOOK_TIMEOUT_S = 3.0


class Engine(Protocol):
    """What is needed of an engine."""

    @property
    def name(self) -> str:
        """Which server it is, in messages."""

    @property
    def url(self) -> str | None:
        """Its address, None before it has started."""

    @property
    def key(self) -> str | None:
        """What its server asks for."""

    async def stopped(self) -> list[str]:
        """Its processes that the kernel has stopped."""
        ...


async def states_of(engines: Sequence[Engine], router_pid: int | None) -> list[str]:
    """A sentence for each server, and for the router, that keeps others waiting; [] where all is well."""
    found = await asyncio.gather(*(_state(engine) for engine in engines))
    stopped = process_info.stopped_below(router_pid) if router_pid is not None else []
    router = [f"the SGLang router has stopped processes: {_named(stopped)}"] if stopped else []
    return [*router, *(sentence for sentence in found if sentence)]


async def _state(engine: Engine) -> str | None:
    if engine.url is None:  # it has not started
        return None
    try:
        stopped = await asyncio.wait_for(engine.stopped(), LOOK_TIMEOUT_S)
    except TimeoutError:
        return f"SGLang server {engine.name} ({engine.url}) cannot be asked: no answer of its actor"
    except Exception as error:  # a dead actor: the watch over it says so, with the cause
        return f"SGLang server {engine.name} ({engine.url}) cannot be asked: {type(error).__name__}"
    if stopped:
        return f"SGLang server {engine.name} ({engine.url}) has stopped processes: {_named(stopped)}"
    if (await asyncio.to_thread(load_of, engine.url, LOOK_TIMEOUT_S, engine.key)).running is None:
        return f"SGLang server {engine.name} ({engine.url}) does not answer"
    return None


def _named(processes: Sequence[str]) -> str:
    return f"{', '.join(processes)} (SIGSTOP or a debugger: `kill -CONT` lets them continue)"
