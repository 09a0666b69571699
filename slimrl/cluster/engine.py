"""One inference engine: a server on the slots of one node, or of several with one process on each.

Promises that its processes live and end together: the death of one ends the others and is reported once, with the
last lines of its log. Made and used by the fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.exceptions import RayActorError

from slimrl.cluster.engine_actor import EngineActor, ServerEnd, ServerSettings
from slimrl.cluster.same_machine import taken_for_one
from slimrl.cluster.slots import ENGINE_SHARE, EnginePart, Slots
from slimrl.processes import ProcessStartError
from slimrl.sglang.server import NodePart
from slimrl.weights.roles import EngineEndpoint

KILL_TIMEOUT_S = 10.0  # for an actor to end its process; one that hangs is killed, and its process follows it


@dataclasses.dataclass(frozen=True)
class ActorPlace:
    """What every engine actor is given besides its server: logs, log level, environment and working folder."""

    log_dir: Path
    log_level: str
    environment: dict[str, str]
    folder: Path


class Engine:
    """The actors of one server, the one with the HTTP server first."""

    what_follows, arrived = "another takes its place", "started"  # in messages: when it is lost, and after `start`

    def __init__(self, settings: ServerSettings, parts: Sequence[EnginePart], slots: Slots, place: ActorPlace) -> None:
        """Places one actor per node, on the first slot of its part; `start` starts the processes."""
        self.url: str | None = None
        self.settings = settings
        self._parts = parts
        self._slots = slots
        self._place = place
        self._actors = [self._actor(rank, part) for rank, part in enumerate(parts)]
        self._watches = [actor.watch.remote() for actor in self._actors]

    @property
    def name(self) -> str:
        """Which server it is, in messages and file names."""
        return self.settings.name

    @property
    def key(self) -> str | None:
        """What the server asks for."""
        return self.settings.key

    def _suffix(self, rank: int) -> str:
        return self.name + (f".node{rank}" if rank else "")

    def _actor(self, rank: int, part: EnginePart) -> ray.actor.ActorHandle:
        place, suffix = self._place, self._suffix(rank)
        return EngineActor.options(
            **self._slots.options(part.slots[0], ENGINE_SHARE),
            runtime_env={"env_vars": place.environment},
            name=f"engine {suffix}",
        ).remote(self.settings, place.log_dir / f"engine{suffix}.log", place.log_level, place.folder)

    def successor(self) -> Engine:
        """Another server on the same slots, not started; this one must have been ended."""
        settings = dataclasses.replace(self.settings, life=self.settings.life + 1)
        return Engine(settings, self._parts, self._slots, self._place)

    async def start(self, timeout_s: float) -> None:
        """Starts the processes and waits until the server answers.

        Raises ProcessStartError when one of them dies or `timeout_s` is over, and where its nodes cannot hold it.
        """
        await self._check_nodes()
        meeting = await self._claim(0, None)
        await asyncio.gather(*(self._claim(rank, meeting) for rank in range(1, len(self._parts))))
        urls = await asyncio.gather(*(actor.start.remote() for actor in self._actors))
        self.url = urls[0]
        ready = asyncio.wrap_future(self._actors[0].wait_ready.remote(timeout_s).future())
        others = [asyncio.wrap_future(watch.future()) for watch in self._watches[1:]]
        done, _ = await asyncio.wait([ready, *others], return_when=asyncio.FIRST_COMPLETED)
        if ready not in done:
            raise ProcessStartError(str(await self._end_together(done.pop().result())))
        await ready

    async def _check_nodes(self) -> None:
        if len(self._actors) == 1:
            return
        marks = await asyncio.gather(*(actor.mark.remote() for actor in self._actors))
        seen = await asyncio.gather(*(actor.seen_of.remote(marks) for actor in self._actors))
        if (why := taken_for_one(marks, seen)) is not None:
            await self._stop_at_once()
            raise ProcessStartError(f"SGLang server {self.name} cannot start: {why}")

    async def _claim(self, rank: int, meeting: str | None) -> str:
        gpu_ids = [self._slots.slots[slot].gpu_id for slot in self._parts[rank].slots]
        log_path = self._place.log_dir / f"sglang{self._suffix(rank)}.log"
        return await self._actors[rank].claim.remote(NodePart(rank, len(self._parts), meeting), gpu_ids, log_path)

    @property
    def endpoint(self) -> EngineEndpoint:
        """Where weights are sent to, once it has started."""
        return EngineEndpoint(
            self.url,
            slots=[slot for part in self._parts for slot in part.slots],
            nodes=[part.node for part in self._parts for _ in part.slots],
            tensor_parallel_size=self.settings.tensor_parallel_size,
            life=self.settings.life,
            key=self.settings.key,
        )

    async def memory(self) -> dict[str, float]:
        """Resident memory of its processes on all nodes, GiB by name; of those on lost nodes nothing."""
        answers = await asyncio.gather(*(actor.memory.remote() for actor in self._actors), return_exceptions=True)
        known: dict[str, float] = {}
        for answer in answers:
            if isinstance(answer, RayActorError):  # the watch over it says so
                continue
            if isinstance(answer, BaseException):
                raise answer
            known |= answer
        return known

    async def stopped(self) -> list[str]:
        """Its processes that the kernel has stopped, on all nodes."""
        answers = await asyncio.gather(*(actor.stopped.remote() for actor in self._actors))
        return [name for answer in answers for name in answer]

    async def last_log_lines(self) -> tuple[Path, str]:
        """The log of its first node, and the end of it."""
        return await self._actors[0].last_log_lines.remote()

    async def watch(self) -> ServerEnd:
        """Pending while all processes live; then the first death, when the others were ended."""
        watches = [asyncio.wrap_future(watch.future()) for watch in self._watches]
        done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        return await self._end_together(next(iter(done)).result())

    async def _end_together(self, end: ServerEnd) -> ServerEnd:
        """Ends what is left after a death and says so."""
        if len(self._actors) == 1:
            return end
        await self._stop_at_once()
        others = f"its processes on the other {len(self._actors) - 1} nodes were ended"
        return dataclasses.replace(end, last_lines=f"{end.last_lines}\n{others}")

    async def kill(self) -> None:
        """Ends it at once and for good, whatever is left of it: also one that hangs, or whose actor is dead."""
        await self._stop_at_once()
        for actor in self._actors:
            ray.kill(actor)

    async def _stop_at_once(self) -> None:
        stops = asyncio.gather(*(actor.stop.remote(0.0) for actor in self._actors), return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stops, KILL_TIMEOUT_S)

    async def close(self) -> None:
        """Ends the processes, then the actors; one that was killed, or lost, is passed over."""
        answers = await asyncio.gather(*(actor.stop.remote() for actor in self._actors), return_exceptions=True)
        for actor in self._actors:
            ray.kill(actor)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, RayActorError):
                raise answer
