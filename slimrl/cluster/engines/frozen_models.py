"""The frozen models of --sglang-config: judges, teachers, references, each with its servers and a router of its own.

The rollout manager owns them. They start and end with the policy's engines and get no weight updates. The death of a
server or router ends the run with a message that names the model. With --use-fault-tolerance it is replaced
(`FrozenRecovery`): a new server has the model, options and GPUs of the lost one, or GPUs of a spare node if its own is
lost, and serves as soon as it has started, since it needs no weights. The events of all models reach the driver in one
list. On shared GPUs their memory is released and resumed with that of the engines; the servers then restore their
weights from host memory.

Custom functions find each router in `args.sglang_model_routers`, by the name of the model.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from slimrl.arguments import Arguments
from slimrl.arguments.engine_groups import EnginePlace, frozen_places
from slimrl.arguments.hf_config import teachers_of_groups
from slimrl.cluster.engines.engine import Engine, EngineActorConfig, ServerSettings
from slimrl.cluster.engines.engine_group import (
    READY_TIMEOUT_S,
    AnyEngine,
    EngineGroup,
    flags_of_place,
    open_router,
    own_router,
    plain_server_settings,
    register,
)
from slimrl.cluster.engines.engine_recovery import EngineRecovery
from slimrl.cluster.engines.health_monitor import HealthConfig
from slimrl.cluster.engines.router_supervisor import Servers
from slimrl.cluster.launch import Launch
from slimrl.cluster.nodes.comparison import check_node
from slimrl.cluster.placement import EnginePart, GpuBundles
from slimrl.engines.server_protocol import EngineMemory


@dataclasses.dataclass
class FrozenModels:
    """Running servers and routers by the name of their model; empty without frozen models.

    `gpu_memory` is that of each model, to be released while training runs; `recoveries` replace what a model has lost.
    """

    groups: dict[str, EngineGroup] = dataclasses.field(default_factory=dict)
    gpu_memory: dict[str, EngineMemory] = dataclasses.field(default_factory=dict)
    recoveries: dict[str, EngineRecovery] = dataclasses.field(default_factory=dict)
    closing: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @classmethod
    async def start(
        cls, args: Arguments, gpus: GpuBundles, launch: Launch, policy: Awaitable[None] | None = None
    ) -> FrozenModels:
        """Starts all servers and routers, and waits until the routers report them ready.

        Raises ProcessStartError if one dies. On shared GPUs it first waits for the engines of the `policy`.
        """
        places = frozen_places(args, gpus.plan.rollout.start)
        by_model: dict[str, list[tuple[EnginePlace, list[EnginePart]]]] = {}
        for place, parts in zip(places, gpus.frozen_engines, strict=True):
            by_model.setdefault(place.model.name, []).append((place, parts))
        if args.offload_rollout and policy is not None and places:
            await policy
        started = await asyncio.gather(*(_start_model(args, gpus, launch, own) for own in by_model.values()))
        groups = dict(zip(by_model, started, strict=True))
        return cls(
            groups,
            {name: EngineMemory([engine.control() for engine in group.engines]) for name, group in groups.items()},
        )

    @property
    def engines(self) -> list[Engine]:
        """The servers of all models."""
        return [engine for group in self.groups.values() for engine in group.engines if isinstance(engine, Engine)]

    def reachable(self, args: Arguments) -> Arguments:
        """`args` with the address of each model's router in sglang_model_routers, that of the policy among them."""
        if not args.server_models:
            return args
        routers = {name: _address(group.router_url) for name, group in self.groups.items()}
        if args.sglang_router_ip is not None and args.sglang_router_port is not None:
            own = args.sglang_router_ip, args.sglang_router_port
            routers |= {model.name: own for model in args.server_models if model.update_weights}
        args = dataclasses.replace(args, sglang_model_routers=routers)
        teachers = sorted(teachers_of_groups(args) & self.groups.keys()) if args.has_served_teacher else []
        if not teachers:
            return args
        words = [f"{name}={self.groups[name].router_url}" for name in teachers]
        return dataclasses.replace(
            args,
            opd_teacher_urls=[*(args.opd_teacher_urls or []), *words],
            rm_servers_replaced=args.use_fault_tolerance,
        )

    async def watch(self, others: Awaitable[str]) -> str:
        """The result of `others`, or the message of the first death of a frozen model's server or router.

        With `recoveries` only of one that cannot be replaced.
        """
        own = [asyncio.ensure_future(self._watch(name, group)) for name, group in self.groups.items()]
        watches = [asyncio.ensure_future(others), *own]
        done, rest = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        return next(iter(done)).result()

    async def _watch(self, name: str, group: EngineGroup) -> str:
        watched: EngineGroup | EngineRecovery = self.recoveries.get(name, group)
        end = await watched.watch()
        if self.closing.is_set():
            await asyncio.Event().wait()  # a regular shutdown: `others` has the message
        return f"a process of the frozen model {name} has ended: {end}"

    async def release_memory(self) -> None:
        """Releases the memory of all servers; no request may be running."""
        for name, memory in self.gpu_memory.items():
            recovery = self.recoveries.get(name)
            await (asyncio.to_thread(memory.release) if recovery is None else recovery.release_memory())

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Reallocates their memory of `tags`."""
        for name, memory in self.gpu_memory.items():
            recovery = self.recoveries.get(name)
            await (asyncio.to_thread(memory.resume, tags) if recovery is None else recovery.resume_memory(tags))

    async def memory(self) -> dict[str, float]:
        """Resident memory of every server and router in GiB, by name."""
        found: dict[str, float] = {}
        for name, group in self.groups.items():
            of_group = await group.memory()
            found |= {f"router_{name}_rss_gib" if key == "router_rss_gib" else key: of_group[key] for key in of_group}
        return found

    async def close(self) -> None:
        """Ends every router and server."""
        self.closing.set()
        await asyncio.gather(*(group.close() for group in self.groups.values()))


async def _start_model(
    args: Arguments, gpus: GpuBundles, launch: Launch, places: list[tuple[EnginePlace, list[EnginePart]]]
) -> EngineGroup:
    name, log_dir = places[0][0].model.name, Path(args.run_dir).absolute() / "logs"
    folder = flags_of_place(args, places[0][0]).hf_checkpoint
    check = functools.partial(check_node, args, model=("--sglang-config", folder))
    config = EngineActorConfig(log_dir, args.log_level, launch.actor_setup(), check)
    engines = [
        Engine(_settings(args, place, index, launch), parts, gpus, config)
        for index, (place, parts) in enumerate(places)
    ]
    disaggregated = places[0][0].model.disaggregated
    router = own_router(args, log_dir / f"router_{name}.log", port=None, disaggregated=disaggregated)
    opening = asyncio.to_thread(open_router, router)
    await asyncio.gather(opening, *(engine.start(READY_TIMEOUT_S) for engine in engines))
    endpoints = [engine.endpoint for engine in engines]
    await asyncio.to_thread(register, router, [endpoint.url for endpoint in endpoints])
    return EngineGroup(list(engines), endpoints, router, router.url, args.rollout_health_check_timeout)


def _settings(args: Arguments, place: EnginePlace, index: int, launch: Launch) -> ServerSettings:
    """The settings of server number `index` of its model."""
    settings = plain_server_settings(flags_of_place(args, place), index, launch)
    backup = {"enable_weights_cpu_backup": True} if args.offload_rollout else {}
    return dataclasses.replace(
        settings,
        role=f"_{place.model.name}-",
        options={**backup, **settings.options},
        worker_type=place.group.worker_type,
    )


def _address(url: str) -> tuple[str, int]:
    parts = urllib.parse.urlsplit(url)
    assert parts.hostname is not None and parts.port is not None  # a router's own
    return parts.hostname, parts.port


@dataclasses.dataclass
class OwnCalls:
    """In place of a client: custom functions call the router of a frozen model, rewards the servers of theirs."""

    server_urls: list[str] = dataclasses.field(default_factory=list)
    resent: int = 0

    def set_concurrency(self, requests: int) -> None:
        """Does nothing: custom functions decide how many requests they send."""


class FrozenRecovery(EngineRecovery):
    """Supervises the servers of one model that gets no weight updates, and its router if it has one."""

    def __init__(
        self,
        flags: HealthConfig,
        group: Servers,
        memory: EngineMemory,
        report: Callable[[str], None],
        policy: EngineRecovery | None = None,
    ) -> None:
        """`report(line)` is called for every event; `policy` has the engines that may share GPUs with these servers."""
        self._report, self._policy = report, policy
        super().__init__(flags, group, OwnCalls(), memory, needs_weight_sync=False, concurrency=0)

    async def _start_monitored(self, engine: AnyEngine) -> None:
        """After the policy's engine on the same GPUs, as at the start: each takes a fraction of the free memory."""
        if self._policy is not None and isinstance(engine, Engine) and engine.settings.shares_gpus:
            await self._policy.started_on(engine.endpoint.gpus)
        await super()._start_monitored(engine)

    def _event(self, line: str) -> None:
        self._report(line)
        self._notify()
