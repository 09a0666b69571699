"""One inference engine: a server on the GPUs of one or more nodes, and the Ray actors of its processes.

Each node of the server has one `EngineActor`, which starts, watches and ends the process there. `Engine` controls them
as one server. If one process dies, the others are ended, and the death is reported once, with its last log lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from slimrl.arguments.engine_groups import REGULAR
from slimrl.cluster import ray_session
from slimrl.cluster.engines.health_monitor import ServerExit
from slimrl.cluster.launch import ActorSetup, BindConfig, node_address, server_host
from slimrl.cluster.nodes.comparison import (
    NodeMark,
    NodesDifferError,
    place_node_mark,
    shared_memory_conflict,
    visible_marks,
)
from slimrl.cluster.placement import ENGINE_SHARE, REWARD_SHARE, EnginePart, InsufficientGpusError, ReservedGpus
from slimrl.engines.backend import SGLANG, backend
from slimrl.engines.server_protocol import CALL_TIMEOUT_S, NodePart, ServerControl, ServerLaunch, ServerProcess
from slimrl.observability.tracer import Timeline
from slimrl.platform.launch_env import network_of
from slimrl.processes import ProcessStartError, process_info
from slimrl.processes.process_info import resident_gib
from slimrl.weights.update.topology import EngineEndpoint

POLL_INTERVAL_S = 0.25
CLOSE_TIMEOUT_S, MEMORY_TIMEOUT_S = 120.0, 5.0
PORT_TIMEOUT_S = 15.0  # for the port of a lost server to be free


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """The settings that the processes of one server share on all its nodes.

    `life` counts how often the server was replaced; every life has its own log files.
    """

    index: int
    model_path: str
    tensor_parallel_size: int
    random_seed: int
    options: dict[str, Any]
    memory_saver: bool  # whether its memory can be released
    cuda: bool  # whether it runs on GPUs
    shares_gpus: bool = False  # with training ranks (colocated)
    nccl: dict[str, str] = dataclasses.field(default_factory=dict)  # variables in common with the ranks of its group
    life: int = 0
    role: str = ""  # prefix of its name; empty for an engine of the policy
    bind: BindConfig = BindConfig()
    key: str | None = dataclasses.field(default=None, repr=False)
    batch_invariant: bool = False  # --true-on-policy-mode
    engine: str = SGLANG  # its row in `engines.backend`
    keeps_port: bool = False  # a replacement on the same node serves at the same address: clients have a list
    port: int | None = None  # of the lost server, for its replacement
    worker_type: str = REGULAR

    @property
    def name(self) -> str:
        """ "0" in its first life, "0.1" in its second; prefixed with its role."""
        return f"{self.role}{self.index}.{self.life}" if self.life else f"{self.role}{self.index}"

    @property
    def label(self) -> str:
        """Its name in messages: "SGLang server 0.1"."""
        return f"{backend(self.engine).title} server {self.name}"


@ray.remote(concurrency_groups={"watch": 1, "stop": 1, "memory": 1})
class EngineActor:
    """One process of a server, on one node."""

    def __init__(self, settings: ServerSettings, actor_log: Path, log_level: str, setup: ActorSetup) -> None:
        setup.enter()
        ray_session.redirect_to(actor_log, log_level)
        self._settings = settings
        self._server: ServerProcess | None = None
        self._stopping = False
        self._marks = contextlib.ExitStack()

    def claim(self, part: NodePart, gpu_ids: list[int | str], log_path: Path, port: int | None) -> str:
        """Reserves the ports, `port` or any; returns the rendezvous address of the processes on all nodes."""
        settings = self._settings
        # Ray assigned the actor a fraction of the first GPU; the server needs all GPUs of its part visible.
        launch = ServerLaunch(
            settings.cuda,
            settings.memory_saver,
            settings.shares_gpus,
            settings.nccl,
            tuple(gpu_ids),
            network_of(settings.bind.local_address()),
            settings.batch_invariant,
            settings.worker_type,
        )
        server = backend(settings.engine).server(
            settings.model_path,
            host=server_host(settings.options.get("host"), settings.bind.local_address()),
            tensor_parallel_size=settings.tensor_parallel_size,
            random_seed=settings.random_seed,
            options=settings.options,
            launch=launch,
            log_path=log_path,
            part=part,
            key=settings.key,
            port=port,
        )
        deadline = time.monotonic() + (PORT_TIMEOUT_S if port is not None else 0.0)
        while True:
            try:
                rendezvous = server.claim()
                break
            except OSError:  # the lost server's actor may still hold the port
                if time.monotonic() >= deadline:
                    raise
            time.sleep(POLL_INTERVAL_S)
        self._server = server
        return rendezvous

    def mark(self) -> NodeMark:
        """Places this node's mark in shared memory until `start` (see `nodes.shared_memory_conflict`)."""
        return self._marks.enter_context(place_node_mark(node_address()))

    def visible_marks(self, marks: list[NodeMark]) -> set[str]:
        """The names of the marks that are visible on this node."""
        return visible_marks(marks)

    def start(self) -> str:
        """Starts the process without waiting; returns its URL (only the first node's process serves requests)."""
        self._marks.close()
        self._server.start()
        return self._server.url

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the server responds. Raises ProcessStartError with its last log lines if it dies."""
        self._server.wait_ready(timeout_s)

    @ray.method(concurrency_group="watch")
    def watch(self) -> ServerExit:
        """Pending while the process lives; then its exit code and last log lines."""
        while (server := self._server) is None or (code := server.poll()) is None:
            time.sleep(POLL_INTERVAL_S)
        part = server.part
        name = self._settings.label + (f", node {part.rank} of {part.count}" if part.count > 1 else "")
        if self._stopping:
            return ServerExit(f"{name} was stopped")
        what = f"{name} ({server.url}) died with exit code {code}"
        return ServerExit(what, server.log_path, server.last_log_lines(20))

    @ray.method(concurrency_group="memory")
    def stopped(self) -> list[str]:
        """Stopped processes of the server (SIGSTOP, a debugger), as "name (pid)"."""
        return [] if self._server is None or not self._server.started else process_info.stopped_below(self._server.pid)

    @ray.method(concurrency_group="memory")
    def last_log_lines(self) -> tuple[Path, str]:
        """The path of the server's log and its last lines."""
        return self._server.log_path, self._server.last_log_lines(20)

    @ray.method(concurrency_group="memory")
    def memory(self) -> dict[str, float]:
        """Resident memory in GiB by name, of the server's processes on this node and of this actor."""
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


KILL_TIMEOUT_S = 10.0  # for an actor to end its process; then the actor is killed, and its process with it


@dataclasses.dataclass(frozen=True)
class EngineActorConfig:
    """Settings of every engine actor besides its server."""

    log_dir: Path
    log_level: str
    setup: ActorSetup
    check_node: Callable[[str], Awaitable[None]] | None = None  # raises NodesDifferError for a node that cannot be used


class Engine:
    """The actors of one server, the one with the HTTP server first."""

    lost_message, started_message = "a replacement will be started", "started"  # after a loss, and after `start`

    def __init__(
        self, settings: ServerSettings, parts: Sequence[EnginePart], gpus: ReservedGpus, config: EngineActorConfig
    ) -> None:
        """Places one actor per node, on the first GPU of its part; `start` starts the processes."""
        self.url: str | None = None
        self.settings = settings
        self._parts = parts
        self._gpus = gpus
        self._config = config
        self._placements = 0
        self._place()

    def _place(self) -> None:
        self._placements += 1
        self._actors = [self._actor(rank, part) for rank, part in enumerate(self._parts)]
        self._watches = [actor.watch.remote() for actor in self._actors]

    @property
    def name(self) -> str:
        """Its name in file names."""
        return self.settings.name

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.settings.label

    def _suffix(self, rank: int) -> str:
        return self.name + (f".node{rank}" if rank else "")

    def _actor(self, rank: int, part: EnginePart) -> ray.actor.ActorHandle:
        config, suffix = self._config, self._suffix(rank)
        again = f", placement {self._placements}" if self._placements > 1 else ""  # Ray may not have freed the name yet
        return EngineActor.options(  # type: ignore[attr-defined]
            **self._gpus.options(part.gpus[0], REWARD_SHARE if self.settings.role else ENGINE_SHARE),
            **config.setup.options(),
            name=f"engine {suffix}{again}",
        ).remote(self.settings, config.log_dir / f"engine{suffix}.log", config.log_level, config.setup)

    def respawn(self) -> Engine:
        """A new server on the same GPUs, not yet started; this one must have ended."""
        port = urllib.parse.urlsplit(self.url).port if self.settings.keeps_port else None
        settings = dataclasses.replace(self.settings, life=self.settings.life + 1, port=port or self.settings.port)
        return Engine(settings, self._parts, self._gpus, self._config)

    async def placed(self) -> None:
        """Pending until Ray has nodes for its actors. Raises RayActorError if they end there at once."""
        try:
            await asyncio.gather(*(actor.__ray_ready__.remote() for actor in self._actors))
        except RayActorError:  # Ray had put them on a lost node before it noticed the loss
            self._place()
            await asyncio.gather(*(actor.__ray_ready__.remote() for actor in self._actors))

    async def start(self, timeout_s: float, timeline: Timeline | None = None) -> None:
        """Starts the processes and waits until the server responds; records both parts of the wait in `timeline`.

        Raises ProcessStartError if one of them dies, after `timeout_s`, or if its nodes cannot host one server.
        """
        began = time.monotonic_ns()
        if self.settings.life:
            await self._take_over_spares()
        await self._check_nodes()
        rendezvous = await self._claim(0, None)
        await asyncio.gather(*(self._claim(rank, rendezvous) for rank in range(1, len(self._parts))))
        urls = await asyncio.gather(*(actor.start.remote() for actor in self._actors))
        self.url = urls[0]
        launched = time.monotonic_ns()
        ready = asyncio.wrap_future(self._actors[0].wait_ready.remote(timeout_s).future())
        others = [asyncio.wrap_future(watch.future()) for watch in self._watches[1:]]
        done, _ = await asyncio.wait([ready, *others], return_when=asyncio.FIRST_COMPLETED)
        if ready not in done:
            raise ProcessStartError(str(await self._stop_all(done.pop().result())))
        await ready
        if timeline is not None:
            process = f"server {self.url}"
            timeline.add_span("start", "start of the actor", began, launched, process)
            timeline.add_span("start", "start of the server", launched, time.monotonic_ns(), process)

    async def _take_over_spares(self) -> None:
        """Finds the actors of a replacement: Ray has put them on a spare node if that of the lost server is lost.

        Raises ProcessStartError if that node cannot be used.
        """
        await self.placed()
        try:
            await asyncio.to_thread(self._gpus.follow)
            if self._gpus.lost([gpu for part in self._parts for gpu in part.gpus]):
                raise InsufficientGpusError("a node is lost, and Ray has not reserved others for all of its GPUs")
            parts = [dataclasses.replace(part, node=self._gpus.gpus[part.gpus[0]].node) for part in self._parts]
            for node in {part.node for part in parts} - {part.node for part in self._parts}:
                self.settings = dataclasses.replace(self.settings, port=None)  # the address is another anyway
                if self._config.check_node is not None:
                    await self._config.check_node(node)
        except (InsufficientGpusError, NodesDifferError) as error:
            raise ProcessStartError(f"{self.label} cannot start on a spare node: {error}") from error
        self._parts = parts

    async def _check_nodes(self) -> None:
        if len(self._actors) == 1:
            return
        marks = await asyncio.gather(*(actor.mark.remote() for actor in self._actors))
        seen = await asyncio.gather(*(actor.visible_marks.remote(marks) for actor in self._actors))
        if (why := shared_memory_conflict(marks, seen)) is not None:
            await self._stop_now()
            raise ProcessStartError(f"{self.label} cannot start: {why}")

    async def _claim(self, rank: int, rendezvous: str | None) -> str:
        gpu_ids = [self._gpus.gpus[gpu].gpu_id for gpu in self._parts[rank].gpus]
        log_path = self._config.log_dir / f"{self.settings.engine}{self._suffix(rank)}.log"
        part, port = NodePart(rank, len(self._parts), rendezvous), None if rank else self.settings.port
        return await self._actors[rank].claim.remote(part, gpu_ids, log_path, port)

    @property
    def endpoint(self) -> EngineEndpoint:
        """The endpoint for weight updates; valid after `start`."""
        return EngineEndpoint(
            self.url,
            gpus=[gpu for part in self._parts for gpu in part.gpus],
            nodes=[part.node for part in self._parts for _ in part.gpus],
            tensor_parallel_size=self.settings.tensor_parallel_size,
            life=self.settings.life,
            key=self.settings.key,
            engine=self.settings.engine,
        )

    def control(self, timeout_s: float = CALL_TIMEOUT_S) -> ServerControl:
        """The control client of its server, valid after `start`; each call has `timeout_s`."""
        return backend(self.settings.engine).control(self.url, timeout_s, self.settings.key)

    async def memory(self) -> dict[str, float]:
        """Resident memory of its processes on all nodes in GiB by name, without lost nodes; {} if it waits for one."""
        calls = asyncio.gather(*(actor.memory.remote() for actor in self._actors), return_exceptions=True)
        try:
            results = await asyncio.wait_for(calls, MEMORY_TIMEOUT_S)
        except TimeoutError:
            return {}
        memory: dict[str, float] = {}
        for result in results:
            if isinstance(result, RayActorError):  # `watch` reports the death
                continue
            if isinstance(result, BaseException):
                raise result
            memory |= result
        return memory

    async def stopped(self) -> list[str]:
        """Its stopped processes (SIGSTOP, a debugger) on all nodes."""
        results = await asyncio.gather(*(actor.stopped.remote() for actor in self._actors))
        return [name for names in results for name in names]

    async def last_log_lines(self) -> tuple[Path, str]:
        """The path of its first node's log and the last lines."""
        return await self._actors[0].last_log_lines.remote()

    async def watch(self) -> ServerExit:
        """Pending while all processes live; then ends the others and returns the first death."""
        watches = [asyncio.wrap_future(watch.future()) for watch in self._watches]
        done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        return await self._stop_all(next(iter(done)).result())

    async def _stop_all(self, end: ServerExit) -> ServerExit:
        """Ends the remaining processes after a death and adds that to `end`."""
        if len(self._actors) == 1:
            return end
        await self._stop_now()
        others = f"its processes on the other {len(self._actors) - 1} nodes were ended"
        return dataclasses.replace(end, last_lines=f"{end.last_lines}\n{others}")

    async def kill(self) -> None:
        """Kills its processes and actors immediately, even if the server hangs or an actor is dead."""
        await self._stop_now()
        for actor in self._actors:
            ray.kill(actor)

    async def _stop_now(self) -> None:
        stops = asyncio.gather(*(actor.stop.remote(0.0) for actor in self._actors), return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stops, KILL_TIMEOUT_S)

    async def close(self) -> None:
        """Ends the processes, then the actors; ignores actors that are dead already, or wait for a node."""
        stops = asyncio.gather(*(actor.stop.remote() for actor in self._actors), return_exceptions=True)
        results = []
        with contextlib.suppress(TimeoutError):
            results = await asyncio.wait_for(stops, CLOSE_TIMEOUT_S)
        for actor in self._actors:
            ray.kill(actor)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, RayActorError):
                raise result
