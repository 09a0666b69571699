"""Replaces servers and the router that are lost, while the rest of the run continues (`--use-fault-tolerance`).

Promises that a lost server is ended for good before another takes its GPUs, that the other is put behind the router
only when it has been given the weights of the run, that the router comes back at its address with the same servers, and
that a server which dies again and again ends the run. Lives in the rollout manager; its other half, which brings the
weights, is `resync` in the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from slimrl.cluster.engines.engine import ServerExit
from slimrl.cluster.engines.engine_group import READY_TIMEOUT_S, AnyEngine, EngineGroup
from slimrl.cluster.engines.health_monitor import HealthConfig, HealthMonitor
from slimrl.cluster.engines.router_supervisor import RouterSupervisor
from slimrl.engines.protocol import EngineError
from slimrl.engines.sglang.client import RouterClient
from slimrl.engines.sglang.control import ServerControl, load_of
from slimrl.engines.sglang.engine_memory import EngineMemory, Server
from slimrl.processes import ProcessStartError
from slimrl.weights.update.topology import EngineEndpoint

logger = logging.getLogger(__name__)

MAX_LOSSES = 3  # of one place in a row
KEEP_TRYING_S = READY_TIMEOUT_S + 300.0  # a request waits so long for a server: the only one may have to start again
DEATH_GRACE_S = 1.0  # until a death is noticed
LOAD_TIMEOUT_S = 2.0
LOG_TIMEOUT_S = 5.0
START_LIMIT_S = READY_TIMEOUT_S + 60.0  # also where the actor never answers
LONG_LIFE_S = 600.0  # of a server whose loss does not count with those before it


class Phase(enum.Enum):
    """Where the server of a place stands."""

    SERVING = "serving"
    LOST = "lost"  # or being started
    WAITING = "waiting"  # for weights


@dataclasses.dataclass
class _EngineSlot:
    """One server's GPUs, and what became of the servers there."""

    engine: AnyEngine
    phase: Phase = Phase.SERVING
    losses: int = 0  # in a row
    since: float = dataclasses.field(default_factory=time.monotonic)  # its last change
    blamed: asyncio.Future[str] = dataclasses.field(default_factory=asyncio.Future)

    def losses_with_this(self) -> int:
        """The server there is lost: how many were in a row, where one that served for long begins a new row."""
        served_long = self.phase is Phase.SERVING and time.monotonic() - self.since >= LONG_LIFE_S
        return 1 if served_long else self.losses + 1

    def has(self, engine: AnyEngine) -> bool:
        """Whether `engine` is there: neither lost nor replaced."""
        return self.engine is engine and self.phase is not Phase.LOST


@dataclasses.dataclass(frozen=True)
class RecoveryEvents:
    """What happened after the events that were known; `serial` counts all events so far."""

    serial: int
    lines: list[str]


@dataclasses.dataclass(frozen=True)
class EngineGroupStatus:
    """Servers that have started and wait for weights, and how many work."""

    waiting: list[EngineEndpoint]
    serving: int


class EngineRecovery:
    """Make it inside the event loop in which its methods are called."""

    def __init__(
        self,
        flags: HealthConfig,
        fleet: EngineGroup,
        client: RouterClient,
        memory: EngineMemory,
        *,
        weights_come: bool,
        key: str | None = None,
    ) -> None:
        """Takes over the watch of `fleet`, and the lists of servers in `client` and `memory`.

        `weights_come` is false where nobody trains: servers have their weights from the start then. `key` opens them.
        """
        self._fleet, self._client, self._memory = fleet, client, memory
        self._weights_come = weights_come
        self._key = key
        self._places = [_EngineSlot(engine) for engine in fleet.engines]
        self._monitor = HealthMonitor(flags, len(fleet.engines), key)
        self._events: list[str] = []
        self._counts: Counter[str] = Counter()
        self._resent = client.resent
        self._changed = asyncio.Event()
        self._memory_turn = asyncio.Lock()
        self._router = RouterSupervisor(fleet.router, self._monitor, self._serving, self._event)
        self._starting: set[int] = set()
        self._updated: list[AnyEngine] = []  # to which weights are in flight, or were
        self._starts_paused = False  # training has the GPUs, or is about to
        self._loop = asyncio.get_running_loop()
        memory.when_lost = self._blame_from_thread
        self._tasks = [asyncio.create_task(self._supervise_engine(index)) for index in range(len(self._places))]
        self._tasks.append(asyncio.create_task(self._router.keep()))

    # -- asked by the rollout manager ------------------------------------------------------------------------------

    async def watch(self) -> str:
        """Pending while what is lost can be replaced; then why it cannot."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    def generation_begins(self) -> None:
        """The first wait of the probes restarts."""
        self._monitor.generation_begins()

    async def generation_ends(self) -> None:
        """A rollout is complete: servers that worked and are still there have shown that they can."""
        self._router.losses = 0
        serving = [(place, place.engine) for place in self._places if place.phase is Phase.SERVING]
        loads = [asyncio.to_thread(load_of, engine.url, LOAD_TIMEOUT_S, self._key) for _, engine in serving]
        for (place, engine), load in zip(serving, await asyncio.gather(*loads), strict=True):
            if load.prefilled and place.has(engine):
                place.losses = 0

    def take_metrics(self) -> dict[str, float]:
        """What happened since this was asked last."""
        names = ("servers_lost", "servers_replaced", "router_restarts", "requests_resent")
        counts, self._counts = self._counts, Counter()
        counts["router_restarts"] = self._router.take_restarts()
        counts["requests_resent"], self._resent = self._client.resent - self._resent, self._client.resent
        return {f"rollout/faults/{name}": float(counts[name]) for name in names}

    async def release_memory(self) -> None:
        """As `EngineMemory.release`, once no server is starting; none starts until all memory is back."""
        self._starts_paused = True
        if self._starting:
            names = ", ".join(self._places[index].engine.name for index in sorted(self._starting))
            self._event(f"training waits for the start of SGLang server {names}, which has the memory that it needs")
        while self._starting:
            await self._change()
        async with self._memory_turn:
            await asyncio.to_thread(self._memory.release)

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """As `EngineMemory.resume`."""
        async with self._memory_turn:
            await asyncio.to_thread(self._memory.resume, tags)
        self._starts_paused = bool(self._memory.released)
        self._notify()

    async def close(self) -> None:
        """Ends the watch; servers and router are the fleet's to end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._monitor.close()

    # -- asked by the driver ---------------------------------------------------------------------------------------

    async def news(self, serial: int) -> RecoveryEvents:
        """Pending until there are more than `serial` events; then those after it."""
        while len(self._events) <= serial:
            await self._change()
        return RecoveryEvents(len(self._events), self._events[serial:])

    async def standing(self) -> EngineGroupStatus:
        """Where the servers stand now."""
        waiting = [place.engine.endpoint for place in self._places if place.phase is Phase.WAITING]
        return EngineGroupStatus(waiting, sum(place.phase is Phase.SERVING for place in self._places))

    async def begin_weight_update(self, only_waiting: bool) -> list[EngineEndpoint]:
        """The servers to update; waits for the first, unless `only_waiting`. Their schedulers may be silent now."""
        wanted = (Phase.WAITING,) if only_waiting else (Phase.WAITING, Phase.SERVING)
        self._monitor.updating_weights = True
        self._notify()
        while not (chosen := [place for place in self._places if place.phase in wanted]) and not only_waiting:
            await self._change()
        if not chosen:
            self._monitor.updating_weights = False
        self._updated = [place.engine for place in chosen]
        return [engine.endpoint for engine in self._updated]

    async def end_weight_update(self, urls: Sequence[str], version: str) -> None:
        """These servers hold the weights `version`: those of them that waited are put behind the router.

        Another server that came to one of these addresses meanwhile continues waiting.
        """
        self._monitor.updating_weights = False
        given = [place for place in self._places if place.engine.url in urls and place.engine in self._updated]
        joined = [place for place in given if place.phase is Phase.WAITING]
        await self._admit_engine(joined, f"has weights {version}")

    async def weight_update_failed(self, urls: Sequence[str]) -> list[str]:
        """Which of these servers are lost, each of which is probed; the others may be updated again."""
        await asyncio.sleep(DEATH_GRACE_S)
        self._monitor.updating_weights = False
        present = [(place, engine) for engine in self._updated for place in self._places if place.has(engine)]
        ills = await asyncio.gather(*(self._probe(engine) for _, engine in present))
        for (place, engine), ill in zip(present, ills, strict=True):
            if ill is not None:
                self._blame(place, engine, ill)
        await asyncio.sleep(0)  # their keepers take notice
        well = {engine.url for place, engine in present if place.has(engine) and not place.blamed.done()}
        return [url for url in urls if url not in well]

    async def _probe(self, engine: AnyEngine) -> str | None:
        try:
            return await self._monitor.probe(engine)
        except RayActorError as error:
            return f"died with its actor: {_first_line(error)}"

    # -- servers ---------------------------------------------------------------------------------------------------

    async def _supervise_engine(self, index: int) -> str:
        """Replaces the servers of one place, one after the other; returns why that makes no more sense."""
        place = self._places[index]
        end = await self._end_of(place)
        while True:
            place.losses = place.losses_with_this()
            if place.losses >= MAX_LOSSES:
                why = f"without a rollout that it helped to complete, or {LONG_LIFE_S:g} s of service, in between"
                return f"{end}\nit was lost {place.losses} times in a row, {why}"
            await self._remove_engine(place, end)
            while self._starts_paused and not (self._monitor.updating_weights and not self._any_left()):
                await self._change()
            try:
                await self._start(index)
            except (ProcessStartError, RayActorError, EngineError, OSError) as error:
                cause = error.cause if isinstance(error, RayTaskError) else error
                end = ServerExit(f"SGLang server {place.engine.name} did not start: {cause}")
                continue
            end = await self._end_of(place)

    async def _end_of(self, place: _EngineSlot) -> ServerExit:
        """Pending while the server lives and is well."""
        engine = place.engine
        death = asyncio.ensure_future(engine.watch())
        wait_unhealthy = asyncio.ensure_future(self._monitor.wait_unhealthy(engine))
        watches: list[asyncio.Future[Any]] = [death, wait_unhealthy, place.blamed]
        try:
            await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                return death.result()
            what = (place.blamed if place.blamed.done() else wait_unhealthy).result()
        except RayActorError as error:  # its actor or the machine under it
            what = f"died with its actor: {_first_line(error)}"
            return ServerExit(f"SGLang server {engine.name} ({engine.url}) {what}")
        finally:
            for watch in (death, wait_unhealthy):
                watch.cancel()
        log, lines = None, ""
        with contextlib.suppress(RayActorError, TimeoutError):
            log, lines = await asyncio.wait_for(engine.last_log_lines(), LOG_TIMEOUT_S)
        return ServerExit(f"SGLang server {engine.name} ({engine.url}) {what}", log, lines)

    async def _remove_engine(self, place: _EngineSlot, end: ServerExit) -> None:
        """Takes a lost server out of everything and ends what is left of it."""
        place.phase = Phase.LOST
        self._counts["servers_lost"] += 1
        self._set_lists()
        log = f" (log: {end.log_path})" if end.log_path is not None else ""
        self._event(f"{end.what}{log}; {place.engine.what_follows}")
        await asyncio.gather(place.engine.kill(), self._router.settle())

    async def _start(self, index: int) -> None:
        """Starts the next server of a place; it waits for weights then."""
        place = self._places[index]
        self._starting.add(index)
        try:
            place.engine, place.blamed = self._fleet.replace_engine(index), self._loop.create_future()
            await self._start_of(place.engine)
            async with self._memory_turn:
                await asyncio.to_thread(self._memory.adopt, ServerControl(place.engine.url, key=self._key))
                place.phase = Phase.WAITING
                self._set_lists()
        finally:
            self._starting.discard(index)
            self._notify()
        if self._weights_come:
            name, arrived = place.engine.name, place.engine.arrived
            self._event(f"SGLang server {name} ({place.engine.url}) {arrived} and waits for weights")
        else:
            await self._admit_engine([place], place.engine.arrived)

    async def _start_of(self, engine: AnyEngine) -> None:
        """Raises ProcessStartError where a process stands still meanwhile, or the start never ends."""
        start = asyncio.ensure_future(engine.start(READY_TIMEOUT_S))
        wait_hung = asyncio.ensure_future(self._monitor.wait_hung(engine))
        try:
            done, _ = await asyncio.wait([start, wait_hung], timeout=START_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise ProcessStartError(f"it was not there after {START_LIMIT_S:g} s")
            if not start.done():
                raise ProcessStartError(f"it {wait_hung.result()}")
            start.result()
        finally:
            wait_hung.cancel()
            start.cancel()

    async def _admit_engine(self, places: Sequence[_EngineSlot], what: str) -> None:
        for place in places:
            place.phase, place.since = Phase.SERVING, time.monotonic()
            self._counts["servers_replaced"] += 1
        if places:
            self._set_lists()
            await self._router.settle()
        for place in places:
            self._event(f"SGLang server {place.engine.name} ({place.engine.url}) {what} and serves")

    def _any_left(self) -> bool:
        return bool(self._starting) or any(place.phase is not Phase.LOST for place in self._places)

    def _set_lists(self) -> None:
        self._client.server_urls = self._serving()
        self._memory.servers = [
            ServerControl(place.engine.url, key=self._key) for place in self._places if place.phase is not Phase.LOST
        ]

    def _serving(self) -> list[str]:
        return [place.engine.url for place in self._places if place.phase is Phase.SERVING]

    def _blame_from_thread(self, server: Server, error: EngineError) -> None:
        """A server failed a call; its place is found by its address."""
        for place in self._places:
            if (engine := place.engine).url == server.url:
                self._loop.call_soon_threadsafe(self._blame, place, engine, f"failed a call: {error}")

    def _blame(self, place: _EngineSlot, engine: AnyEngine, what: str) -> None:
        if place.has(engine) and not place.blamed.done():
            place.blamed.set_result(what)

    # -- events ----------------------------------------------------------------------------------------------------

    def _event(self, line: str) -> None:
        """The driver hears of it, too."""
        logger.warning("%s", line)
        self._events.append(line)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        """Until anything has changed."""
        await self._changed.wait()


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
