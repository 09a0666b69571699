"""Replaces lost servers and a lost router while the run continues (`--use-fault-tolerance`).

Guarantees: a lost server is killed before its replacement uses its GPUs; the replacement is registered with the router
only after it has the run's weights; the router restarts at the same address with the same servers; a server that dies
repeatedly ends the run, unless it is one of `ElasticEngines`, which join and leave in the same way. Runs in the rollout
manager; `weight_update_recovery` in the driver sends the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError

from slimrl.cluster.engines.elastic_engines import ElasticEngines
from slimrl.cluster.engines.engine_group import READY_TIMEOUT_S, AnyEngine, abort_orphans
from slimrl.cluster.engines.health_monitor import (
    EngineGroupStatus,
    HealthConfig,
    HealthMonitor,
    RecoveryEvents,
    ServerExit,
)
from slimrl.cluster.engines.router_supervisor import Servers, router_supervisor
from slimrl.engines.protocol import EngineError, ServerList
from slimrl.engines.server_protocol import EngineMemory, MemoryControl
from slimrl.processes import ProcessStartError
from slimrl.weights.update.topology import EngineEndpoint

logger = logging.getLogger(__name__)

MAX_LOSSES = 3  # consecutive, of one slot
RETRY_TIMEOUT_S = READY_TIMEOUT_S + 300.0  # of a request: long enough for the only server to restart
DEATH_GRACE_S = 1.0  # for `watch` to report a death
LOAD_TIMEOUT_S, LOG_TIMEOUT_S = 2.0, 5.0
START_LIMIT_S = READY_TIMEOUT_S + 60.0  # bounds the start even if the actor never answers
LONG_LIFE_S = 600.0  # a server that served this long resets the count of consecutive losses
NOT_STARTED = (ProcessStartError, RayError, EngineError, OSError)


class Phase(enum.Enum):
    """The state of a slot's server."""

    SERVING = "serving"
    LOST = "lost"  # or being started
    WAITING = "waiting"  # for weights


@dataclasses.dataclass(eq=False)
class _EngineSlot:
    """The GPUs of one server, its current engine and the history of losses there."""

    engine: AnyEngine
    phase: Phase = Phase.SERVING
    elastic: bool = False  # the run can go on without it
    losses: int = 0  # consecutive
    since: float = dataclasses.field(default_factory=time.monotonic)  # when it started serving
    failure: asyncio.Future[str] = dataclasses.field(default_factory=asyncio.Future)  # set by `_mark_failed`

    def losses_with_this(self) -> int:
        """Consecutive losses including the current one; a server that served for LONG_LIFE_S resets the count."""
        served_long = self.phase is Phase.SERVING and time.monotonic() - self.since >= LONG_LIFE_S
        return 1 if served_long else self.losses + 1

    def has(self, engine: AnyEngine) -> bool:
        """Whether `engine` is the slot's current engine and not lost."""
        return self.engine is engine and self.phase is not Phase.LOST


class EngineRecovery:
    """Supervises and replaces the engines. Construct it in the event loop that calls its methods."""

    def __init__(
        self,
        flags: HealthConfig,
        group: Servers,
        client: ServerList,
        memory: EngineMemory,
        *,
        needs_weight_sync: bool,
        concurrency: int,
        elastic: ElasticEngines | None = None,
    ) -> None:
        """Takes over the watch of `group`, and the lists of servers in `client` and `memory`.

        `needs_weight_sync` is false without a trainer: servers then keep the weights that they load at start.
        `concurrency` is the number of requests per server.
        """
        self._group, self._client, self._memory = group, client, memory
        self._needs_weight_sync = needs_weight_sync
        self._concurrency, self._elastic = concurrency, elastic
        self._slots = [_EngineSlot(engine) for engine in group.engines]
        places = range(0) if elastic is None else elastic.places
        self._monitor = HealthMonitor(flags, len(group.engines) + len(places))
        self._events: list[str] = []
        self._counts: Counter[str] = Counter()
        self._resent = client.resent
        self._changed = asyncio.Event()
        self._memory_lock = asyncio.Lock()
        self._router = router_supervisor(group.router, self._monitor, self._serving, self._event)
        self._starting: set[_EngineSlot] = set()
        self._updated: list[AnyEngine] = []  # the engines of the current or last weight update
        self._starts_paused = False  # training has the GPUs, or is about to
        self._awaited = False  # a weight update waits for the first server
        self._loop = asyncio.get_running_loop()
        memory.when_lost = self._mark_failed_from_thread
        self._tasks = [asyncio.create_task(self._supervise_engine(index)) for index in range(len(self._slots))]
        self._tasks += [asyncio.create_task(self._supervise_elastic(place)) for place in places]
        self._tasks.append(asyncio.create_task(self._router.supervise()))

    # -- called by the rollout manager -----------------------------------------------------------------------------

    async def watch(self) -> str:
        """Pending while lost servers can be replaced; then the reason that one cannot."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    def generation_begins(self) -> None:
        """Restarts the probes' --rollout-health-check-first-wait."""
        self._monitor.generation_begins()

    async def generation_ends(self) -> None:
        """Resets the loss counts of the router and of each server that processed requests: a rollout is complete."""
        self._router.losses = 0
        serving = [(slot, slot.engine) for slot in self._slots if slot.phase is Phase.SERVING]
        loads = [asyncio.to_thread(engine.control(LOAD_TIMEOUT_S).load) for _, engine in serving]
        for (slot, engine), load in zip(serving, await asyncio.gather(*loads), strict=True):
            if load.prefilled and slot.has(engine):
                slot.losses = 0

    def take_metrics(self) -> dict[str, float]:
        """The fault counts since the previous call."""
        names = ("servers_lost", "servers_replaced", "servers_joined", "router_restarts", "requests_resent")
        counts, self._counts = self._counts, Counter()
        counts["router_restarts"] = self._router.take_restarts()
        counts["requests_resent"], self._resent = self._client.resent - self._resent, self._client.resent
        return {f"rollout/faults/{name}": float(counts[name]) for name in names}

    async def release_memory(self) -> None:
        """`EngineMemory.release`, after all starting servers are up; no server starts until all memory is resumed."""
        self._starts_paused = True
        if self._starting:
            names = ", ".join(sorted(slot.engine.label for slot in self._starting))
            self._event(f"training waits until {names} has started, which still holds the GPU memory")
        while self._starting:
            await self._wait_change()
        async with self._memory_lock:
            await asyncio.to_thread(self._memory.release)

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """`EngineMemory.resume`."""
        async with self._memory_lock:
            await asyncio.to_thread(self._memory.resume, tags)
        self._starts_paused = bool(self._memory.released)
        self._notify()

    async def close(self) -> None:
        """Stops supervising; `EngineGroup` ends the servers and the router."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._monitor.close()
        if self._elastic is not None:
            await asyncio.to_thread(self._elastic.close)

    # -- called by the driver --------------------------------------------------------------------------------------

    async def events(self, serial: int) -> RecoveryEvents:
        """Pending until there are more than `serial` events; then those after it."""
        while len(self._events) <= serial:
            await self._wait_change()
        return RecoveryEvents(len(self._events), self._events[serial:])

    async def status(self) -> EngineGroupStatus:
        """The waiting servers and the number of serving ones."""
        waiting = [slot.engine.endpoint for slot in self._slots if slot.phase is Phase.WAITING]
        return EngineGroupStatus(waiting, sum(slot.phase is Phase.SERVING for slot in self._slots))

    async def begin_weight_update(self, only_waiting: bool) -> list[EngineEndpoint]:
        """Returns the servers to update; waits for the first one unless `only_waiting`.

        Until the update ends, the health monitor accepts unresponsive schedulers.
        """
        wanted = (Phase.WAITING,) if only_waiting else (Phase.WAITING, Phase.SERVING)
        self._monitor.updating_weights = True
        self._notify()
        while not (chosen := [slot for slot in self._slots if slot.phase in wanted]) and not only_waiting:
            self._awaited = True
            self._notify()
            await self._wait_change()
        self._awaited = False
        if not chosen:
            self._monitor.updating_weights = False
        self._updated = [slot.engine for slot in chosen]
        return [engine.endpoint for engine in self._updated]

    async def end_weight_update(self, urls: Sequence[str], version: str) -> None:
        """Registers those of the servers at `urls` that waited with the router: they have the weights `version` now.

        A replacement that took one of these addresses during the update keeps waiting.
        """
        self._monitor.updating_weights = False
        updated = [slot for slot in self._slots if slot.engine.url in urls and slot.engine in self._updated]
        await self._admit_engines([slot for slot in updated if slot.phase is Phase.WAITING], f"has weights {version}")

    async def weight_update_failed(self, urls: Sequence[str]) -> list[str]:
        """Probes the servers at `urls` and returns the lost ones; the others can be updated again."""
        await asyncio.sleep(DEATH_GRACE_S)
        self._monitor.updating_weights = False
        present = [(slot, engine) for engine in self._updated for slot in self._slots if slot.has(engine)]
        problems = await asyncio.gather(*(self._probe(engine) for _, engine in present))
        for (slot, engine), problem in zip(present, problems, strict=True):
            if problem is not None:
                self._mark_failed(slot, engine, problem)
        await asyncio.sleep(0)  # lets their `_supervise_engine` tasks run
        healthy = {engine.url for slot, engine in present if slot.has(engine) and not slot.failure.done()}
        return [url for url in urls if url not in healthy]

    async def _probe(self, engine: AnyEngine) -> str | None:
        try:
            return await self._monitor.probe(engine)
        except RayActorError as error:
            return "died with its actor: " + str(error).partition("\n")[0]

    # -- servers ---------------------------------------------------------------------------------------------------

    async def _supervise_engine(self, index: int) -> str:
        """Replaces the slot's server each time it is lost; returns the reason when it gives up."""
        slot = self._slots[index]
        end = await self._wait_lost(slot)
        while True:
            slot.losses = slot.losses_with_this()
            if slot.losses >= MAX_LOSSES:
                condition = f"without a completed rollout or {LONG_LIFE_S:g} s of service in between"
                return f"{end}\nit was lost {slot.losses} times in a row, {condition}"
            await self._remove_engine(slot, end)
            await self._wait_for_gpus()
            slot.engine, slot.failure = self._group.replace_engine(index), self._loop.create_future()
            end = await self._serve(slot)

    async def _supervise_elastic(self, place: int) -> str:
        """Lets one engine after the other join at a place of `ElasticEngines`; never returns."""
        assert self._elastic is not None
        while True:
            engine = await self._elastic.next_engine(place, self._has_its_own_engines)
            slot = _EngineSlot(engine, Phase.LOST, elastic=True)
            self._slots.append(slot)
            self._group.engines.append(engine)
            end = await self._serve(slot)
            joined = slot.phase is not Phase.LOST
            await self._remove_engine(slot, end)
            self._slots.remove(slot)
            self._group.engines.remove(engine)
            self._elastic.give_back(place, failed=not joined)

    def _has_its_own_engines(self) -> bool:
        return all(slot.elastic or slot.phase is not Phase.LOST for slot in self._slots)

    async def _serve(self, slot: _EngineSlot) -> ServerExit:
        """Starts the slot's engine; pending until it is lost, or did not start."""
        try:
            await slot.engine.placed()  # if its node is lost, as soon as there is a spare one
            await self._wait_for_gpus()
            await self._start(slot)
        except NOT_STARTED as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            return ServerExit(f"{slot.engine.label} did not start: {cause}")
        return await self._wait_lost(slot)

    async def _wait_for_gpus(self) -> None:
        """Waits while training has the GPUs, unless it waits for the first server with its weights alone on them."""
        while self._starts_paused and not (self._awaited and not self._any_left()):
            await self._wait_change()

    async def _wait_lost(self, slot: _EngineSlot) -> ServerExit:
        """Pending while the server is alive and healthy; then returns how it was lost."""
        engine = slot.engine
        death = asyncio.ensure_future(engine.watch())
        wait_unhealthy = asyncio.ensure_future(self._monitor.wait_unhealthy(engine))
        watches: list[asyncio.Future[Any]] = [death, wait_unhealthy, slot.failure]
        try:
            await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                return death.result()
            what = (slot.failure if slot.failure.done() else wait_unhealthy).result()
        except RayActorError as error:  # its actor or machine died
            what = "died with its actor: " + str(error).partition("\n")[0]
            return ServerExit(f"{engine.label} ({engine.url}) {what}")
        finally:
            for watch in (death, wait_unhealthy):
                watch.cancel()
        log, lines = None, ""
        with contextlib.suppress(RayActorError, TimeoutError):
            log, lines = await asyncio.wait_for(engine.last_log_lines(), LOG_TIMEOUT_S)
        return ServerExit(f"{engine.label} ({engine.url}) {what}", log, lines)

    async def _remove_engine(self, slot: _EngineSlot, end: ServerExit) -> None:
        """Removes a lost server from the client, the memory control and the router, and kills its processes."""
        slot.phase = Phase.LOST
        self._counts["servers_lost"] += 1
        self._publish_servers()
        log = f" (log: {end.log_path})" if end.log_path is not None else ""
        self._event(f"{end.what}{log}; {slot.engine.lost_message}")
        await asyncio.gather(slot.engine.kill(), self._router.sync_workers())
        await abort_orphans(self._group.engines, slot.engine, self._serving())

    async def _start(self, slot: _EngineSlot) -> None:
        """Starts the new engine of a slot, which then waits for weights if there is a trainer."""
        self._starting.add(slot)
        try:
            await self._start_monitored(slot.engine)
            async with self._memory_lock:
                await asyncio.to_thread(self._memory.adopt, slot.engine.control())
                slot.phase = Phase.WAITING
                self._publish_servers()
        finally:
            self._starting.discard(slot)
            self._notify()
        if self._needs_weight_sync:
            label, started = slot.engine.label, slot.engine.started_message
            self._event(f"{label} ({slot.engine.url}) {started} and waits for weights")
        else:
            await self._admit_engines([slot], slot.engine.started_message)

    async def _start_monitored(self, engine: AnyEngine) -> None:
        """Starts `engine`. Raises ProcessStartError if one of its processes is stopped, or after START_LIMIT_S."""
        start = asyncio.ensure_future(engine.start(READY_TIMEOUT_S))
        wait_hung = asyncio.ensure_future(self._monitor.wait_hung(engine))
        try:
            done, _ = await asyncio.wait([start, wait_hung], timeout=START_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise ProcessStartError(f"it was not ready after {START_LIMIT_S:g} s")
            if not start.done():
                raise ProcessStartError(f"it {wait_hung.result()}")
            start.result()
        finally:
            wait_hung.cancel()
            start.cancel()

    async def _admit_engines(self, slots: Sequence[_EngineSlot], what: str) -> None:
        for slot in slots:
            slot.phase, slot.since = Phase.SERVING, time.monotonic()
            self._counts["servers_joined" if slot.elastic else "servers_replaced"] += 1
        if slots:
            self._publish_servers()
            await self._router.sync_workers()
        for slot in slots:
            self._event(f"{slot.engine.label} ({slot.engine.url}) {what} and serves")

    def _any_left(self) -> bool:
        return bool(self._starting) or any(slot.phase is not Phase.LOST for slot in self._slots)

    def _publish_servers(self) -> None:
        self._client.server_urls = self._serving()
        counted = sum(not slot.elastic or slot.phase is Phase.SERVING for slot in self._slots)  # others come back
        self._client.set_concurrency(self._concurrency * counted)
        self._memory.servers = [slot.engine.control() for slot in self._slots if slot.phase is not Phase.LOST]

    def _serving(self) -> list[str]:
        return [slot.engine.url for slot in self._slots if slot.phase is Phase.SERVING]

    def _mark_failed_from_thread(self, server: MemoryControl, error: EngineError) -> None:
        """Marks the server with `server`'s address as failed; safe to call from any thread."""
        for slot in self._slots:
            if (engine := slot.engine).url == server.url:
                self._loop.call_soon_threadsafe(self._mark_failed, slot, engine, f"failed a call: {error}")

    def _mark_failed(self, slot: _EngineSlot, engine: AnyEngine, what: str) -> None:
        if slot.has(engine) and not slot.failure.done():
            slot.failure.set_result(what)

    async def started_on(self, gpus: Collection[int]) -> None:
        """Pending while an engine on one of these GPUs (indices in GPU order) is lost or starts."""
        lost = Phase.LOST
        while any(slot.phase is lost and set(gpus) & set(slot.engine.endpoint.gpus) for slot in self._slots):
            await self._wait_change()

    # -- events ----------------------------------------------------------------------------------------------------

    def _event(self, line: str) -> None:
        """Logs an event and passes it to the driver."""
        logger.warning("%s", line)
        self._events.append(line)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_change(self) -> None:
        """Waits for the next `_notify`."""
        await self._changed.wait()
