"""The inference fleet: one engine actor per server, the router in front of them, and the watch over both."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import ray

from slimrl.arguments import Arguments
from slimrl.cluster.engine_actor import EngineActor
from slimrl.cluster.slots import ENGINE_SHARE, Slots
from slimrl.sglang.router import RouterProcess
from slimrl.weights.sync import EngineEndpoint

READY_TIMEOUT_S = 900.0
ROUTER_READY_TIMEOUT_S = 120.0
POLL_INTERVAL_S = 0.25


@dataclasses.dataclass
class Fleet:
    """Running servers and their router. Made by `Fleet.start`, ended by `close`."""

    engines: list[ray.actor.ActorHandle]
    endpoints: list[EngineEndpoint]
    router: RouterProcess | None
    router_url: str

    @classmethod
    async def start(cls, args: Arguments, slots: Slots, environment: dict[str, str]) -> Fleet:
        """Starts every server, then the router; returns when all of them answer through it."""
        log_dir = Path(args.run_dir).absolute() / "logs"
        per_engine = args.rollout_num_gpus_per_engine
        groups = [slots.plan.rollout[i : i + per_engine] for i in range(0, len(slots.plan.rollout), per_engine)]
        engines = [
            EngineActor.options(
                **slots.options(group[0], ENGINE_SHARE), runtime_env={"env_vars": environment}, name=f"engine {index}"
            ).remote(index, log_dir / f"engine{index}.log", args.log_level, Path.cwd())
            for index, group in enumerate(groups)
        ]
        urls = await asyncio.gather(
            *(
                engine.start.remote(
                    args.hf_checkpoint,
                    tensor_parallel_size=per_engine,
                    gpu_ids=[slots.slots[slot].gpu_id for slot in group],
                    random_seed=args.rollout_seed + index,
                    options=args.sglang_options,
                    log_path=log_dir / f"sglang{index}.log",
                    ready_timeout_s=READY_TIMEOUT_S,
                )
                for index, (engine, group) in enumerate(zip(engines, groups, strict=True))
            )
        )
        endpoints = [EngineEndpoint(url, slots=list(group)) for url, group in zip(urls, groups, strict=True)]
        router, router_url = await asyncio.to_thread(cls._start_router, args, urls, log_dir / "router.log")
        return cls(engines, endpoints, router, router_url)

    @staticmethod
    def _start_router(args: Arguments, urls: list[str], log_path: Path) -> tuple[RouterProcess, str]:
        router = RouterProcess(
            host=ray.util.get_node_ip_address(),
            options={"request_timeout_secs": args.sglang_router_request_timeout_secs, **args.router_options},
            log_path=log_path,
        )
        router.start()
        router.wait_alive(ROUTER_READY_TIMEOUT_S)
        for url in urls:
            router.add_worker(url)
        router.wait_ready(len(urls), ROUTER_READY_TIMEOUT_S)
        return router, router.url

    async def watch(self) -> str:
        """Pending while all servers and the router live; then the message of the first death."""
        watches = [asyncio.wrap_future(engine.watch.remote().future()) for engine in self.engines]
        tasks = [asyncio.ensure_future(watch) for watch in watches]
        tasks.append(asyncio.ensure_future(self._watch_router()))
        done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        return next(iter(done)).result()

    async def _watch_router(self) -> str:
        while (code := self.router.poll()) is None:
            await asyncio.sleep(POLL_INTERVAL_S)
        return (
            f"the SGLang router ({self.router_url}) died with exit code {code}; last lines of"
            f" {self.router.log_path}:\n{self.router.last_log_lines(20)}"
        )

    async def close(self) -> None:
        """Ends the router, then every server."""
        await asyncio.to_thread(self.router.stop)
        await asyncio.gather(*(engine.stop.remote() for engine in self.engines))
        for engine in self.engines:
            ray.kill(engine)
