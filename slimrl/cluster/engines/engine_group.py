"""`EngineGroup`: starts and watches the engines and the router in front of them. `ExternalEngine`: an external server.

An external engine (--rollout-external-engine-addrs) has the methods of `engine.Engine`. It receives weights and is
never started or ended here. `watch` reports when it stops responding, and when its owner restarted it (without the
run's weights). A busy server, as in a weight update, still responds; `HealthMonitor` detects a stuck scheduler.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import sys
import time
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slimrl.arguments import Arguments
from slimrl.arguments.engine_groups import (
    DECODE,
    PREFILL,
    EnginePlace,
    group_flags,
    policy_places,
)
from slimrl.cluster.engines.engine import Engine, EngineActorConfig, ServerSettings
from slimrl.cluster.engines.health_monitor import ServerExit
from slimrl.cluster.launch import LOOPBACK, Launch, key_of, server_host
from slimrl.cluster.nodes.comparison import check_node
from slimrl.cluster.placement import GpuBundles
from slimrl.engines.backend import PYTHON_OPTION, backend
from slimrl.engines.protocol import EngineError
from slimrl.engines.server_protocol import CALL_TIMEOUT_S, ExternalServer, Router, ServerControl
from slimrl.engines.shared_adapters import UNLOAD_TIMEOUT_S, owner_of, remove_adapters
from slimrl.models.adapters import AdapterConfig
from slimrl.observability.tracer import Timeline
from slimrl.processes.process_info import resident_gib
from slimrl.weights.update.topology import EngineEndpoint

LOOK_INTERVAL_S = 1.0
LOOKS_PER_S = 64  # at all external servers together: each is two HTTP calls
ANSWER_TIMEOUT_S = 5.0


async def wait_until_unresponsive(
    url: str, responds: Callable[[float], bool], limit_s: float, interval_s: float = LOOK_INTERVAL_S
) -> str:
    """Pending while `responds(timeout_s)` returns true at least once per `limit_s`; then returns an error message."""
    last_answer = time.monotonic()
    while time.monotonic() - last_answer < limit_s:
        await asyncio.sleep(min(interval_s, limit_s / 4))
        if await asyncio.to_thread(responds, min(ANSWER_TIMEOUT_S, limit_s)):
            last_answer = time.monotonic()
    return f"{url} has not answered for {limit_s:g} s (--rollout-health-check-timeout)"


class ExternalEngine:
    """One external server; `life` counts how often it went away and came back."""

    lost_message, started_message = "it is excluded until it is back", "is back"  # as in `Engine`

    def __init__(self, address: str, index: int, args: Arguments, life: int = 0) -> None:
        self.address, self.index, self.life = address, index, life
        self._args = args
        self._key = key_of(args)
        self._server: ExternalServer | None = None

    @property
    def name(self) -> str:
        """As `Engine.name`."""
        return f"{self.index}.{self.life}" if self.life else f"{self.index}"

    @property
    def label(self) -> str:
        """As `Engine.label`."""
        return f"{backend(self._args.rollout_engine).title} server {self.name}"

    @property
    def url(self) -> str:
        """Its address for requests."""
        return f"http://{self.address}"

    @property
    def endpoint(self) -> EngineEndpoint:
        """The endpoint for weight updates, valid after `start`; it shares no GPUs with training."""
        size = self._server.tensor_parallel_size
        return EngineEndpoint(self.url, gpus=[], tensor_parallel_size=size, life=self.life, key=self._key)

    def control(self, timeout_s: float = CALL_TIMEOUT_S) -> ServerControl:
        """As `Engine.control`."""
        return backend(self._args.rollout_engine).control(self.url, timeout_s, self._key)

    def respawn(self) -> ExternalEngine:
        """The same server after it went away."""
        return ExternalEngine(self.address, self.index, self._args, self.life + 1)

    async def placed(self) -> None:
        """It is where it is."""

    async def start(self, timeout_s: float, timeline: Timeline | None = None) -> None:
        """Checks that the server is usable: once in its first life, in later lives for up to `timeout_s`.

        It records nothing in `timeline`: the server runs already.

        Raises EngineError with one sentence per problem.
        """
        deadline = asyncio.get_running_loop().time() + (timeout_s if self.life else 0.0)
        while True:
            try:
                self._server = await asyncio.to_thread(
                    backend(self._args.rollout_engine).inspect,
                    self.address,
                    self._args.hf_checkpoint,
                    needs_weight_sync=not self._args.debug_rollout_only,
                    key=self._key,
                    adapter=self._args.shared_adapter,
                )
                return
            except EngineError:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def watch(self) -> ServerExit:
        """Pending while it responds and was not restarted."""
        limit_s = self._args.rollout_health_check_timeout
        servers = len(self._args.rollout_external_engine_addrs or ())
        interval_s = min(max(LOOK_INTERVAL_S, servers / LOOKS_PER_S), limit_s / 4)
        responding = wait_until_unresponsive(self.url, self._responds, limit_s, interval_s)
        unresponsive = asyncio.ensure_future(responding)
        try:
            while not unresponsive.done():
                await asyncio.wait([unresponsive], timeout=interval_s)
                if not unresponsive.done() and await asyncio.to_thread(self._server.was_replaced):
                    return ServerExit(f"{self.label} ({self.url}) was restarted by its owner")
            return ServerExit(f"{self.label} of --rollout-external-engine-addrs: {unresponsive.result()}")
        finally:
            unresponsive.cancel()

    def _responds(self, timeout_s: float) -> bool:
        return self.control(timeout_s).responds()

    async def stopped(self) -> list[str]:
        """Empty: its processes are not visible from here."""
        return []

    async def last_log_lines(self) -> tuple[Path | None, str]:
        """None and "": its log is not accessible."""
        return None, ""

    async def memory(self) -> dict[str, float]:
        """Empty: its processes are not visible from here."""
        return {}

    async def kill(self) -> None:
        """Does nothing: its owner ends it."""

    async def close(self) -> None:
        """Unloads the run's adapters; its owner ends it."""
        if (adapter := self._args.shared_adapter) is not None:
            await asyncio.to_thread(remove_adapters, self.control(UNLOAD_TIMEOUT_S), adapter)


def adapter_owner(args: Arguments) -> str:
    """Identifies the run's adapters in external servers; "" for a run that has none there."""
    if args.shared_adapter is None:
        return ""
    return owner_of(Path(args.run_dir if args.save is None or args.eval_only else args.save))


AnyEngine = Engine | ExternalEngine

READY_TIMEOUT_S = 900.0
ROUTER_READY_TIMEOUT_S = 120.0
POLL_INTERVAL_S = 0.25
ABORT_TIMEOUT_S = 10.0


@dataclasses.dataclass
class EngineGroup:
    """Running servers and their router. Made by `EngineGroup.start`, ended by `close`."""

    engines: list[AnyEngine]
    endpoints: list[EngineEndpoint]
    router: Router
    router_url: str
    router_silence_s: float  # how long an external router may not respond
    closing: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @classmethod
    async def start(
        cls, args: Arguments, gpus: GpuBundles, launch: Launch, timeline: Timeline | None = None
    ) -> EngineGroup:
        """Starts every server and the router; returns when the router reports all servers ready."""
        nodes = [part.node for parts in gpus.engines for part in parts]
        server_host(args.engine_options.get("host"), LOOPBACK, nodes)  # raises before anything starts
        log_dir = Path(args.run_dir).absolute() / "logs"
        check = functools.partial(check_node, args)
        config = EngineActorConfig(log_dir, args.log_level, launch.actor_setup(), check)
        engines: list[AnyEngine] = [
            Engine(settings_of_place(args, place, index, launch), parts, gpus, config)
            for index, (place, parts) in enumerate(zip(_policy(args, gpus), gpus.engines, strict=True))
        ] or [
            ExternalEngine(address, index, args)
            for index, address in enumerate(args.rollout_external_engine_addrs or ())
        ]
        disaggregated = any(model.update_weights and model.disaggregated for model in args.server_models)
        router = _router(args, log_dir / "router.log", disaggregated=disaggregated)
        opening = asyncio.to_thread(open_router, router)  # concurrently with the servers: each takes seconds
        await asyncio.gather(opening, *(engine.start(READY_TIMEOUT_S, timeline) for engine in engines))
        endpoints = [engine.endpoint for engine in engines]
        await asyncio.to_thread(register, router, [endpoint.url for endpoint in endpoints])
        return cls(engines, endpoints, router, router.url, args.rollout_health_check_timeout)

    def reachable(self, args: Arguments) -> Arguments:
        """`args` with the router's address in sglang_router_ip and sglang_router_port, for custom functions."""
        parts = urllib.parse.urlsplit(self.router_url)
        return dataclasses.replace(args, sglang_router_ip=parts.hostname, sglang_router_port=parts.port)

    async def memory(self) -> dict[str, float]:
        """Resident memory of the router and of every server in GiB, by name."""
        results = await asyncio.gather(*(engine.memory() for engine in self.engines))
        servers = {name: gib for result in results for name, gib in result.items()}
        router = {} if self.router.pid is None else {"router_rss_gib": resident_gib(self.router.pid)}
        return {**router, **servers}

    async def watch(self) -> str:
        """Pending while all servers and the router live; then the message of the first death, or of `close`."""
        closing = asyncio.ensure_future(self._watch_closing())
        tasks = [closing, *(asyncio.ensure_future(engine.watch()) for engine in self.engines)]
        tasks.append(asyncio.ensure_future(self._watch_router()))
        done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        return closing.result() if closing in done else str(done.pop().result())

    def replace_engine(self, index: int) -> AnyEngine:
        """Replaces engine `index`, which must have ended, by a new one; returns it, not yet started."""
        self.engines[index] = self.engines[index].respawn()
        return self.engines[index]

    async def _watch_closing(self) -> str:
        await self.closing.wait()
        return "the engines were closed"

    async def _watch_router(self) -> str:
        if self.router.is_external:
            error = await wait_until_unresponsive(self.router.url, self.router.responds, self.router_silence_s)
            return f"{self.router.label} (--sglang-router-ip): {error}"
        while (code := self.router.poll()) is None:
            await asyncio.sleep(POLL_INTERVAL_S)
        return (
            f"{self.router.label} ({self.router_url}) died with exit code {code}; last lines of"
            f" {self.router.log_path}:\n{self.router.last_log_lines(20)}"
        )

    async def close(self) -> None:
        """Ends the watch, then the router, then every server; then raises the first failure, if any."""
        self.closing.set()  # first: `watch` must not report these exits as deaths
        await asyncio.to_thread(self.router.stop)
        results = await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result


async def abort_orphans(engines: Sequence[AnyEngine], lost: AnyEngine, serving: Sequence[str]) -> None:
    """Ends the requests of prefill servers after the loss of a decode server; the client sends them again.

    Those of the lost server would wait for it for minutes.
    """
    if not isinstance(lost, Engine) or lost.settings.worker_type != DECODE:
        return
    prefill = [
        engine
        for engine in engines
        if isinstance(engine, Engine) and engine.settings.worker_type == PREFILL and engine.url in serving
    ]
    aborts = (asyncio.to_thread(engine.control(ABORT_TIMEOUT_S).abort_all) for engine in prefill)
    for result in await asyncio.gather(*aborts, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, EngineError):  # a loss is seen by its watch
            raise result


def _router(args: Arguments, log_path: Path, *, disaggregated: bool) -> Router:
    engine = backend(args.rollout_engine)
    if args.sglang_router_ip is not None:
        return engine.external_router(args.sglang_router_ip, args.sglang_router_port, key=key_of(args))
    return own_router(args, log_path, port=args.sglang_router_port, disaggregated=disaggregated)


def own_router(args: Arguments, log_path: Path, *, port: int | None, disaggregated: bool) -> Router:
    """A router that the run starts, at a free port if `port` is None; not yet open.

    `disaggregated`: its servers are prefill and decode servers.
    """
    engine = backend(args.rollout_engine)
    return engine.router(
        host=server_host(args.router_options.get("host"), LOOPBACK),  # only the rollout manager calls it
        port=port,
        options=engine.router_options(
            args.router_options,
            request_timeout_s=args.sglang_router_request_timeout_secs,
            conversations=has_conversations(args),
            disaggregated=disaggregated,
        ),
        log_path=log_path,
        key=key_of(args),
    )


def has_conversations(args: Arguments) -> bool:
    """Whether samples may be multi-turn conversations: a custom function generates them."""
    datasets = args.eval_datasets or []
    functions = [args.custom_generate_function_path, *(one.custom_generate_function_path for one in datasets)]
    return any(functions)


def open_router(router: Router) -> None:
    """Starts it and waits until it responds."""
    router.open()
    router.wait_alive(ROUTER_READY_TIMEOUT_S)


def register(router: Router, urls: list[str]) -> None:
    """Adds the servers and waits until they are in use; stops the router if that fails."""
    try:
        router.add_workers(urls)
        router.wait_ready(len(urls), ROUTER_READY_TIMEOUT_S)
    except EngineError:
        router.stop()  # an external router keeps running; this only removes the run's servers
        raise


def _policy(args: Arguments, gpus: GpuBundles) -> list[EnginePlace]:
    return policy_places(args, gpus.plan.rollout.start)


def flags_of_place(args: Arguments, place: EnginePlace) -> Arguments:
    """The flags as they apply to one engine."""
    return group_flags(args, place.model, place.group)


def settings_of_place(args: Arguments, place: EnginePlace, index: int, launch: Launch) -> ServerSettings:
    """The settings of the policy's engine number `index`."""
    settings = server_settings(flags_of_place(args, place), index, launch)
    return dataclasses.replace(settings, worker_type=place.group.worker_type)


def server_settings(args: Arguments, index: int, launch: Launch, life: int = 0) -> ServerSettings:
    """The settings of server number `index`, in its life number `life`; `args` as they apply to its group."""
    settings = plain_server_settings(args, index, launch, life)
    replayed = backend(args.rollout_engine).routing_options() if args.use_rollout_routing_replay else {}
    return dataclasses.replace(settings, options=settings.options | _weight_update_options(args) | replayed)


def plain_server_settings(args: Arguments, index: int, launch: Launch, life: int = 0) -> ServerSettings:
    """The same without the options for weight updates of a special kind."""
    own = {PYTHON_OPTION: args.vllm_python or sys.executable} if args.uses_vllm else {}
    return ServerSettings(
        index=index,
        life=life,
        model_path=args.hf_checkpoint,
        tensor_parallel_size=args.rollout_num_gpus_per_engine // args.sglang_options.get("pp_size", 1),
        random_seed=args.rollout_seed + index,
        options=args.engine_options | own,
        memory_saver=args.offload_rollout,
        cuda=launch.machine.cuda,
        shares_gpus=launch.run.shares_gpus,
        nccl=launch.servers_nccl,
        bind=launch.bind,
        key=key_of(args),
        engine=args.rollout_engine,
        batch_invariant=args.true_on_policy_mode,
    )


def _weight_update_options(args: Arguments) -> dict[str, Any]:
    """The server's options, by the engine's names, for weight updates of a special kind."""
    adapters = AdapterConfig.from_args(args)
    if adapters is not None and args.engines_have_adapters:
        return backend(args.rollout_engine).adapter_options(adapters, releases_memory=bool(args.offload_rollout))
    if args.update_weight_mode == "delta" or args.every_rank_loads_files:
        return backend(args.rollout_engine).delta_options(args.sglang_options)
    if args.update_weight_transfer_mode == "p2p":
        return backend(args.rollout_engine).point_to_point_options(args.sglang_options)
    return {}
