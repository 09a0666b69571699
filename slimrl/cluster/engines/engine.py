"""One inference engine: an SGLang server on the GPUs of one node or several, and the Ray actors of its processes.

Each node of the server has one `EngineActor`, which starts the process there, watches it and ends it; `Engine` makes
the actors and speaks for all of them. The processes live and end together: the death of one ends the others and is
reported once, with the last lines of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from slimrl.cluster import ray_session
from slimrl.cluster.network import NodeMark, Reach, called_at, marked, node_address, seen_of, taken_for_one
from slimrl.cluster.placement import ENGINE_SHARE, EnginePart, GpuBundles
from slimrl.engines.sglang.launch import ServerLaunch
from slimrl.engines.sglang.server import NodePart, ServerProcess
from slimrl.platform.launch_env import network_of
from slimrl.processes import ProcessStartError, process_info
from slimrl.processes.process_info import resident_gib
from slimrl.weights.update.topology import EngineEndpoint

POLL_INTERVAL_S = 0.25


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """What the processes of one server have in common on all its nodes.

    `life` counts how often the server was replaced: every life has log files of its own.
    """

    index: int
    model_path: str
    tensor_parallel_size: int
    random_seed: int
    options: dict[str, Any]
    memory_saver: bool  # whether its memory can be released
    cuda: bool  # whether it runs on GPUs
    shares_gpus: bool = False  # with training ranks
    nccl_cumem: str | None = None  # NCCL_CUMEM_ENABLE, as of the training ranks that send weights to it
    life: int = 0
    role: str = ""  # what it is, where it is not an engine of the policy
    reach: Reach = Reach()
    key: str | None = dataclasses.field(default=None, repr=False)

    @property
    def name(self) -> str:
        """ "0" in its first life, "0.1" in its second; behind its role."""
        return f"{self.role}{self.index}.{self.life}" if self.life else f"{self.role}{self.index}"


@dataclasses.dataclass(frozen=True)
class ServerExit:
    """How a process of a server ended; as text with the last lines of its log."""

    what: str
    log_path: Path | None = None
    last_lines: str = ""

    def __str__(self) -> str:
        return self.what if self.log_path is None else f"{self.what}; last lines of {self.log_path}:\n{self.last_lines}"


@ray.remote(concurrency_groups={"watch": 1, "stop": 1, "memory": 1})
class EngineActor:
    """One process of a server, on one node."""

    def __init__(self, settings: ServerSettings, actor_log: Path, log_level: str, folder: Path) -> None:
        ray_session.enter(folder)
        ray_session.redirect_to(actor_log, log_level)
        self._settings = settings
        self._server: ServerProcess | None = None
        self._stopping = False
        self._marks = contextlib.ExitStack()

    def claim(self, part: NodePart, gpu_ids: list[int | str], log_path: Path) -> str:
        """Chooses the ports; returns the address at which the processes of all nodes meet."""
        settings = self._settings
        # The server owns whole GPUs, the actor only a share of the first: it is shown all of its own.
        launch = ServerLaunch(
            settings.cuda,
            settings.memory_saver,
            settings.shares_gpus,
            settings.nccl_cumem,
            tuple(gpu_ids),
            network_of(settings.reach.here()),
        )
        server = ServerProcess(
            settings.model_path,
            host=called_at(settings.options.get("host"), settings.reach.here()),
            tensor_parallel_size=settings.tensor_parallel_size,
            random_seed=settings.random_seed,
            options=settings.options,
            launch=launch,
            log_path=log_path,
            part=part,
            key=settings.key,
        )
        meeting = server.claim()
        self._server = server
        return meeting

    def mark(self) -> NodeMark:
        """Marks this node for the processes of the other nodes, until `start`."""
        return self._marks.enter_context(marked(node_address()))

    def seen_of(self, marks: list[NodeMark]) -> set[str]:
        """Which of the marks are on this node too."""
        return seen_of(marks)

    def start(self) -> str:
        """Starts the process and returns at once; its URL, which only the first node's answers requests at."""
        self._marks.close()
        self._server.start()
        return self._server.url

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the server answers. Raises ProcessStartError with its last log lines if it dies."""
        self._server.wait_ready(timeout_s)

    @ray.method(concurrency_group="watch")
    def watch(self) -> ServerExit:
        """Pending while the process lives; then its exit code and last log lines."""
        while (server := self._server) is None or (code := server.poll()) is None:
            time.sleep(POLL_INTERVAL_S)
        part = server.part
        name = f"SGLang server {self._settings.name}" + (
            f", node {part.rank} of {part.count}" if part.count > 1 else ""
        )
        if self._stopping:
            return ServerExit(f"{name} was stopped")
        what = f"{name} ({server.url}) died with exit code {code}"
        return ServerExit(what, server.log_path, server.last_log_lines(20))

    @ray.method(concurrency_group="memory")
    def stopped(self) -> list[str]:
        """Processes of the server that the kernel has stopped (SIGSTOP, a debugger), as "name (pid)"."""
        return [] if self._server is None or not self._server.started else process_info.stopped_below(self._server.pid)

    @ray.method(concurrency_group="memory")
    def last_log_lines(self) -> tuple[Path, str]:
        """The server's log, and the end of it."""
        return self._server.log_path, self._server.last_log_lines(20)

    @ray.method(concurrency_group="memory")
    def memory(self) -> dict[str, float]:
        """Resident memory in GiB by name: of the server's processes on this node, and of this actor."""
        server, index = self._server, f"{self._settings.role}{self._settings.index}"
        if server is None or not server.started:
            return {}
        name = f"server{index}" + (f"_node{server.part.rank}" if server.part.rank else "")
        own = resident_gib(with_children=False)
        return {f"{name}_rss_gib": resident_gib(server.pid), f"{name}_actor_rss_gib": own}

    @ray.method(concurrency_group="stop")
    def stop(self, timeout_s: float | None = None) -> None:
        """Ends the process and everything it started; `timeout_s` as in `ServerProcess.stop`."""
        self._stopping = True
        self._marks.close()
        if self._server is not None:
            self._server.stop(timeout_s)


KILL_TIMEOUT_S = 10.0  # for an actor to end its process; one that hangs is killed, and its process follows it


@dataclasses.dataclass(frozen=True)
class EngineActorConfig:
    """What every engine actor is given besides its server: logs, log level, environment and working folder."""

    log_dir: Path
    log_level: str
    environment: dict[str, str]
    folder: Path


class Engine:
    """The actors of one server, the one with the HTTP server first."""

    what_follows, arrived = "another takes its place", "started"  # in messages: when it is lost, and after `start`

    def __init__(
        self, settings: ServerSettings, parts: Sequence[EnginePart], gpus: GpuBundles, place: EngineActorConfig
    ) -> None:
        """Places one actor per node, on the first GPU of its part; `start` starts the processes."""
        self.url: str | None = None
        self.settings = settings
        self._parts = parts
        self._gpus = gpus
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
        return EngineActor.options(  # type: ignore[attr-defined]
            **self._gpus.options(part.gpus[0], ENGINE_SHARE),
            runtime_env={"env_vars": place.environment},
            name=f"engine {suffix}",
        ).remote(self.settings, place.log_dir / f"engine{suffix}.log", place.log_level, place.folder)

    def respawn(self) -> Engine:
        """Another server on the same GPUs, not started; this one must have been ended."""
        settings = dataclasses.replace(self.settings, life=self.settings.life + 1)
        return Engine(settings, self._parts, self._gpus, self._place)

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
            raise ProcessStartError(str(await self._stop_all(done.pop().result())))
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
        gpu_ids = [self._gpus.gpus[gpu].gpu_id for gpu in self._parts[rank].gpus]
        log_path = self._place.log_dir / f"sglang{self._suffix(rank)}.log"
        return await self._actors[rank].claim.remote(NodePart(rank, len(self._parts), meeting), gpu_ids, log_path)

    @property
    def endpoint(self) -> EngineEndpoint:
        """Where weights are sent to, once it has started."""
        return EngineEndpoint(
            self.url,
            gpus=[gpu for part in self._parts for gpu in part.gpus],
            nodes=[part.node for part in self._parts for _ in part.gpus],
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

    async def watch(self) -> ServerExit:
        """Pending while all processes live; then the first death, when the others were ended."""
        watches = [asyncio.wrap_future(watch.future()) for watch in self._watches]
        done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        return await self._stop_all(next(iter(done)).result())

    async def _stop_all(self, end: ServerExit) -> ServerExit:
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
