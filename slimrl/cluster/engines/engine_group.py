"""`EngineGroup`: the engines, the router in front of them, and the watch over both; `ExternalEngine`, a server as an
engine.

An external engine (--rollout-external-engine-addrs) gets weights and is never started or ended here. It has the methods
of `engine.Engine`. It is reported when it stops answering, and when its owner restarted it, with weights that are not
the run's. A server that is busy, as in a weight update, still answers: `HealthMonitor` tells whether its scheduler is
stuck.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import urllib.parse
from pathlib import Path

from slimrl.arguments import Arguments
from slimrl.cluster.engines.engine import Engine, EngineActorConfig, ServerExit, ServerSettings
from slimrl.cluster.launch import Launch
from slimrl.cluster.network import LOOPBACK, called_at
from slimrl.cluster.placement import GpuBundles
from slimrl.engines.auth import key_of
from slimrl.engines.http import answers
from slimrl.engines.protocol import EngineError
from slimrl.engines.sglang.external_server_check import ExternalServer, inspect
from slimrl.engines.sglang.router import ExternalRouter, RouterProcess, routing_options
from slimrl.processes.process_info import resident_gib
from slimrl.weights.update.topology import EngineEndpoint

LOOK_INTERVAL_S = 1.0
ANSWER_TIMEOUT_S = 5.0
SIGN_OF_LIFE = "/v1/loads"  # answered whatever the scheduler does; a server's /health waits for it to make a token


async def wait_until_unresponsive(url: str, path: str, limit_s: float, key: str | None = None) -> str:
    """Pending while somebody answers a GET of `path` at `url`, at least once in `limit_s`; then a sentence."""
    last_answer = time.monotonic()
    while time.monotonic() - last_answer < limit_s:
        await asyncio.sleep(min(LOOK_INTERVAL_S, limit_s / 4))
        if await asyncio.to_thread(answers, f"{url}{path}", min(ANSWER_TIMEOUT_S, limit_s), key):
            last_answer = time.monotonic()
    return f"{url} has not answered for {limit_s:g} s (--rollout-health-check-timeout)"


class ExternalEngine:
    """One running server; `life` counts how often it went away and came back."""

    what_follows, arrived = "it is left out until it is back", "is back"  # as of `Engine`; nobody starts another

    def __init__(self, address: str, index: int, args: Arguments, life: int = 0) -> None:
        self.address, self.index, self.life = address, index, life
        self._args = args
        self.key = key_of(args)  # what the server asks for
        self._server: ExternalServer | None = None

    @property
    def name(self) -> str:
        """As `Engine.name`."""
        return f"{self.index}.{self.life}" if self.life else f"{self.index}"

    @property
    def url(self) -> str:
        """Its address for requests."""
        return f"http://{self.address}"

    @property
    def endpoint(self) -> EngineEndpoint:
        """Where weights are sent to, once it has started: it is on GPUs of its own."""
        size = self._server.tensor_parallel_size
        return EngineEndpoint(self.url, gpus=[], tensor_parallel_size=size, life=self.life, key=self.key)

    def respawn(self) -> ExternalEngine:
        """The same server after it went away."""
        return ExternalEngine(self.address, self.index, self._args, self.life + 1)

    async def start(self, timeout_s: float) -> None:
        """Looks whether the server can be used, in its first life at once, later for up to `timeout_s`.

        Raises EngineError with a sentence for everything that is wrong with it.
        """
        deadline = asyncio.get_running_loop().time() + (timeout_s if self.life else 0.0)
        while True:
            try:
                self._server = await asyncio.to_thread(
                    inspect,
                    self.address,
                    self._args.hf_checkpoint,
                    weights_come=not self._args.debug_rollout_only,
                    key=self.key,
                )
                return
            except EngineError:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def watch(self) -> ServerExit:
        """Pending while it answers and is the one that was started."""
        limit_s = self._args.rollout_health_check_timeout
        silence = asyncio.ensure_future(wait_until_unresponsive(self.url, SIGN_OF_LIFE, limit_s, self.key))
        try:
            while not silence.done():
                await asyncio.wait([silence], timeout=LOOK_INTERVAL_S)
                if not silence.done() and await asyncio.to_thread(self._server.was_replaced):
                    return ServerExit(f"SGLang server {self.name} ({self.url}) was started again by its owner")
            return ServerExit(f"SGLang server {self.name} of --rollout-external-engine-addrs: {silence.result()}")
        finally:
            silence.cancel()

    async def stopped(self) -> list[str]:
        """Nothing: its processes are not ours to see."""
        return []

    async def last_log_lines(self) -> tuple[Path | None, str]:
        """None: its log is with whoever started it."""
        return None, ""

    async def memory(self) -> dict[str, float]:
        """Nothing, likewise."""
        return {}

    async def kill(self) -> None:
        """Nothing: it is its owner's."""

    async def close(self) -> None:
        """Nothing, likewise."""


AnyEngine = Engine | ExternalEngine
AnyRouter = RouterProcess | ExternalRouter

READY_TIMEOUT_S = 900.0
ROUTER_READY_TIMEOUT_S = 120.0
POLL_INTERVAL_S = 0.25


@dataclasses.dataclass
class EngineGroup:
    """Running servers and their router. Made by `EngineGroup.start`, ended by `close`."""

    engines: list[AnyEngine]
    endpoints: list[EngineEndpoint]
    router: AnyRouter
    router_url: str
    router_silence_s: float  # for so long a router of the user's may not answer
    closing: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @classmethod
    async def start(cls, args: Arguments, gpus: GpuBundles, launch: Launch) -> EngineGroup:
        """Starts every server and the router; returns when all servers answer through it."""
        nodes = [part.node for parts in gpus.engines for part in parts]
        called_at(args.sglang_options.get("host"), LOOPBACK, nodes)  # or says why not, before anything starts
        log_dir = Path(args.run_dir).absolute() / "logs"
        place = EngineActorConfig(log_dir, args.log_level, launch.environment, Path.cwd())
        engines: list[AnyEngine] = [
            Engine(server_settings(args, index, launch), parts, gpus, place) for index, parts in enumerate(gpus.engines)
        ] or [
            ExternalEngine(address, index, args)
            for index, address in enumerate(args.rollout_external_engine_addrs or ())
        ]
        router = _router(args, log_dir / "router.log")
        opening = asyncio.to_thread(_open, router)  # while the servers start: each takes seconds
        await asyncio.gather(opening, *(engine.start(READY_TIMEOUT_S) for engine in engines))
        endpoints = [engine.endpoint for engine in engines]
        await asyncio.to_thread(_register, router, [endpoint.url for endpoint in endpoints])
        return cls(engines, endpoints, router, router.url, args.rollout_health_check_timeout)

    def reachable(self, args: Arguments) -> Arguments:
        """`args` with the address of the router, where functions of the user's look for it."""
        parts = urllib.parse.urlsplit(self.router_url)
        return dataclasses.replace(args, sglang_router_ip=parts.hostname, sglang_router_port=parts.port)

    async def memory(self) -> dict[str, float]:
        """Resident memory of the router and of every server, GiB by name."""
        answers = await asyncio.gather(*(engine.memory() for engine in self.engines))
        servers = {name: amount for answer in answers for name, amount in answer.items()}
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
        """Another server in the place of number `index`, not started; that one must have been ended."""
        self.engines[index] = self.engines[index].respawn()
        return self.engines[index]

    async def _watch_closing(self) -> str:
        await self.closing.wait()
        return "the fleet was closed"

    async def _watch_router(self) -> str:
        if isinstance(self.router, ExternalRouter):
            silence = await wait_until_unresponsive(self.router.url, "/health", self.router_silence_s)
            return f"the SGLang router (--sglang-router-ip): {silence}"
        while (code := self.router.poll()) is None:
            await asyncio.sleep(POLL_INTERVAL_S)
        return (
            f"the SGLang router ({self.router_url}) died with exit code {code}; last lines of"
            f" {self.router.log_path}:\n{self.router.last_log_lines(20)}"
        )

    async def close(self) -> None:
        """Ends the watch, then the router, then every server, before the first failure is raised."""
        self.closing.set()  # first: a server that ends now is no death, nor is its actor
        await asyncio.to_thread(self.router.stop)
        answers = await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer


def _router(args: Arguments, log_path: Path) -> AnyRouter:
    if args.sglang_router_ip is not None:
        return ExternalRouter(args.sglang_router_ip, args.sglang_router_port, key=key_of(args))
    return RouterProcess(
        host=called_at(args.router_options.get("host"), LOOPBACK),  # only the rollout manager calls it
        port=args.sglang_router_port,
        options={
            "request_timeout_secs": args.sglang_router_request_timeout_secs,
            **routing_options(args),
            **args.router_options,
        },
        log_path=log_path,
        key=key_of(args),
    )


def _open(router: AnyRouter) -> None:
    if isinstance(router, ExternalRouter):
        router.check()
    else:
        router.start()
    router.wait_alive(ROUTER_READY_TIMEOUT_S)


def _register(router: AnyRouter, urls: list[str]) -> None:
    try:
        for url in urls:
            router.add_worker(url)
        router.wait_ready(len(urls), ROUTER_READY_TIMEOUT_S)
    except EngineError:
        router.stop()  # one of the user's continues, without servers of ours
        raise


def server_settings(args: Arguments, index: int, launch: Launch) -> ServerSettings:
    """How server number `index` is started."""
    return ServerSettings(
        index=index,
        model_path=args.hf_checkpoint,
        tensor_parallel_size=args.rollout_num_gpus_per_engine // args.sglang_options.get("pp_size", 1),
        random_seed=args.rollout_seed + index,
        options=args.sglang_options,
        memory_saver=args.offload_rollout,
        cuda=launch.machine.cuda,
        shares_gpus=launch.run.shares_gpus,
        nccl_cumem=launch.servers_nccl_cumem,
        reach=launch.reach,
        key=key_of(args),
    )
