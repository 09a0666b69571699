"""The servers of the reward model (`--rm-model`): SGLang on slots of their own, beside the engines of the policy.

Promises that they start with the engines, that the death of one ends the run by name, and that they end with it. They
are behind no router and get no weights. Owned by the rollout manager.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable
from pathlib import Path

from slimrl.arguments import Arguments
from slimrl.arguments.reward_model import RewardModelConfig
from slimrl.cluster.engine import ActorPlace, Engine
from slimrl.cluster.engine_actor import ServerSettings
from slimrl.cluster.launch import Launch
from slimrl.cluster.slots import Slots
from slimrl.sglang.access import OPTION
from slimrl.weights.reward_head import servable_folder

READY_TIMEOUT_S = 900.0
ROLE = "_reward"


@dataclasses.dataclass
class RewardServers:
    """Running servers; none where the run has no reward model, or one that runs already."""

    engines: list[Engine]
    closing: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @classmethod
    async def start(cls, args: Arguments, slots: Slots, launch: Launch) -> RewardServers:
        """Starts every server and returns when all of them answer. Raises ProcessStartError where one dies."""
        if not slots.reward_engines:
            return cls([])
        place = ActorPlace(Path(args.run_dir).absolute() / "logs", args.log_level, launch.environment, Path.cwd())
        folder = Path(args.rm_model).absolute()
        architecture = RewardModelConfig.read(folder).architecture
        model = await asyncio.to_thread(
            servable_folder, folder, architecture, Path(args.run_dir).absolute() / "rm_model"
        )
        engines = [
            Engine(server_settings(args, model, index, launch), parts, slots, place)
            for index, parts in enumerate(slots.reward_engines)
        ]
        await asyncio.gather(*(engine.start(READY_TIMEOUT_S) for engine in engines))
        return cls(engines)

    def reachable(self, args: Arguments) -> Arguments:
        """`args` with the servers' addresses as `--rm-url`, where there are servers."""
        urls = [engine.url for engine in self.engines]
        return dataclasses.replace(args, rm_url=",".join(urls)) if urls else args

    async def watch(self, others: Awaitable[str]) -> str:
        """What `others` says, or the message of the first death of a server here."""
        watches = [asyncio.ensure_future(others), *(asyncio.ensure_future(self._watch(one)) for one in self.engines)]
        done, rest = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        return next(iter(done)).result()

    async def _watch(self, engine: Engine) -> str:
        end = await engine.watch()
        if self.closing.is_set():
            await asyncio.Event().wait()  # it ends because it is told to, and `others` says what ended first
        return f"the reward model's server {engine.settings.index} is gone, nothing can be judged: {end}"

    async def memory(self) -> dict[str, float]:
        """Resident memory of every server, GiB by name."""
        answers = await asyncio.gather(*(engine.memory() for engine in self.engines))
        return {name: amount for answer in answers for name, amount in answer.items()}

    async def close(self) -> None:
        """Ends every server."""
        self.closing.set()
        await asyncio.gather(*(engine.close() for engine in self.engines))


def server_settings(args: Arguments, model: Path, index: int, launch: Launch) -> ServerSettings:
    """How server number `index` is started."""
    options = dict(args.rm_server_options)
    return ServerSettings(
        index=index,
        model_path=str(model),
        tensor_parallel_size=args.rm_num_gpus_per_engine // int(options.get("pp_size", 1)),
        random_seed=args.rollout_seed + index,
        options={**options, "is_embedding": True},
        memory_saver=False,
        cuda=launch.machine.cuda,
        role=ROLE,
        reach=launch.reach,
        key=options.get(OPTION),
    )
