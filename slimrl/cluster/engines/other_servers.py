"""All servers of a run that get no weight updates: the reward model or teachers (--rm-model), and the frozen models.

The servers of --rm-model are SGLang's, beside the policy's engines on dedicated GPUs or with --rm-colocate on theirs.
The model is a reward model, or with `--use-opd --opd-type sglang` the teacher, a language model; `--opd-teacher-models`
has several. `frozen_models` has the models of --sglang-config.

The rollout manager owns them. They start and end with the engines; the death of one ends the run with a message that
names it. With --use-fault-tolerance it is replaced (`RunRecovery`), on a spare node if its own is lost. Those of
--rm-model have no router: the replacement serves at the address of the lost one, and requests wait for it; on a spare
node it has another address, and `when_moved` tells it to the clients. On shared GPUs their memory is released and
resumed with that of the engines; the server then restores its weights from host memory.

`servable_folder` adds the zero bias that SGLang's Qwen2 and Qwen3 sequence classifiers expect and those of transformers
lack. Without it the bias keeps its random initial value, which shifts every reward by a different amount on each
server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
from safetensors.numpy import save_file

from slimrl.arguments import Arguments
from slimrl.arguments.hf_config import TOKEN_CLASSIFIERS, RewardModelConfig, ServedModel, served_models, served_role
from slimrl.cluster.engines.engine import Engine, EngineActorConfig, ServerSettings
from slimrl.cluster.engines.engine_group import EngineGroup
from slimrl.cluster.engines.engine_recovery import EngineRecovery
from slimrl.cluster.engines.frozen_models import FrozenModels, FrozenRecovery
from slimrl.cluster.engines.health_monitor import HealthConfig
from slimrl.cluster.launch import Launch
from slimrl.cluster.nodes.comparison import check_node
from slimrl.cluster.placement import GpuBundles
from slimrl.engines.http import KEY_OPTION
from slimrl.engines.protocol import ServerList
from slimrl.engines.server_protocol import EngineMemory
from slimrl.models.hf_folder import INDEX, read_tensor_names

BIASED = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")
CONFIG = "config.json"
BIAS = "score.bias"
BIAS_FILE = "score-bias.safetensors"


def servable_folder(model: Path, architecture: str, into: Path) -> Path:
    """`model` itself if SGLang can serve it as it is, else `into`, recreated with links to its files.

    A token classifier gets the architecture of the sequence classifier of its family, which has the same weights; a
    sequence classifier without a bias the zero bias. Raises ValueError if the weights to which the bias is added are
    not in safetensors files.
    """
    if architecture in TOKEN_CLASSIFIERS:
        config = json.loads((model / CONFIG).read_text(encoding="utf-8"))
        config["architectures"] = [architecture.replace("Token", "Sequence")]
        _link(model, into, without=CONFIG)
        (into / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        return into
    if architecture not in BIASED:
        return model
    names = read_tensor_names(model)
    if BIAS in names:
        return model
    if not names:
        raise ValueError(f"--rm-model {model} has no safetensors files: save it again with safetensors")
    _link(model, into, without=INDEX)
    labels = RewardModelConfig.read(model).labels
    save_file({BIAS: numpy.zeros(labels, numpy.float32)}, into / BIAS_FILE)
    index = model / INDEX
    if index.is_file():
        content = json.loads(index.read_text())
        content["weight_map"][BIAS] = BIAS_FILE
        (into / INDEX).write_text(json.dumps(content))
    return into


def _link(model: Path, into: Path, *, without: str) -> None:
    """Recreates `into` with links to the files of `model` except one."""
    if into.exists():  # from an earlier start under the same run name, perhaps with another model
        shutil.rmtree(into)
    into.mkdir(parents=True)
    for file in model.iterdir():
        if file.name != without:
            (into / file.name).symlink_to(file.resolve())


READY_TIMEOUT_S = 900.0
ROLES = {"reward model": "_reward", "teacher": "_teacher"}  # in the names of logs


@dataclasses.dataclass
class RewardServers:
    """Running servers; empty without a model to serve or with an external one."""

    engines: list[Engine]
    role: str = "reward model"
    names: tuple[str, ...] = ()  # of the model of each server, with several teachers
    shares_gpus: bool = False  # with training: their memory is released meanwhile
    gpu_memory: EngineMemory = dataclasses.field(default_factory=lambda: EngineMemory([]))
    recovery: EngineRecovery | None = None  # replaces lost servers
    when_moved: Callable[[str, str], None] = lambda old, new: None  # the address that clients have, and that of now
    router: None = None  # as of an `EngineGroup`
    closing: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._known = [engine.url for engine in self.engines]  # the addresses that clients have

    @classmethod
    async def start(
        cls, args: Arguments, gpus: GpuBundles, launch: Launch, policy: Awaitable[None] | None = None
    ) -> RewardServers:
        """Starts every server and waits until all respond. Raises ProcessStartError if one dies.

        On shared GPUs it first waits for the engines of the `policy`: each takes a fraction of the memory that is free.
        """
        if not gpus.reward_engines:
            return cls([])
        of_servers = [model for model in served_models(args) for _ in range(model.gpus // model.per_server)]
        if not args.has_served_teacher:  # one model
            folder = Path(of_servers[0].folder).absolute()
            architecture = RewardModelConfig.read(folder).architecture
            links = Path(args.run_dir).absolute() / "rm_model"
            servable = str(await asyncio.to_thread(servable_folder, folder, architecture, links))
            of_servers = [dataclasses.replace(model, folder=servable) for model in of_servers]
        engines = [
            Engine(server_settings(args, model, index, launch), parts, gpus, _actor_config(args, model, launch))
            for index, (model, parts) in enumerate(zip(of_servers, gpus.reward_engines, strict=True))
        ]
        if args.rm_colocate and policy is not None:
            await policy
        await asyncio.gather(*(engine.start(READY_TIMEOUT_S) for engine in engines))
        names = tuple(model.name for model in of_servers if model.name)
        memory = EngineMemory([engine.control() for engine in engines])
        return cls(engines, served_role(args), names, args.rm_colocate, memory)

    def replace_engine(self, index: int) -> Engine:
        """As `EngineGroup.replace_engine`."""
        self.engines[index] = self.engines[index].respawn()
        return self.engines[index]

    def tell_addresses(self) -> None:
        """Calls `when_moved` for every server that has another address than before."""
        for index, engine in enumerate(self.engines):
            known = self._known[index]
            if engine.url is not None and known is not None and engine.url != known:
                self._known[index] = engine.url
                self.when_moved(known, engine.url)

    def reachable(self, args: Arguments) -> Arguments:
        """`args` with the servers' URLs as `--rm-url`, or as `--opd-teacher-urls`, if there are servers."""
        urls = [engine.url for engine in self.engines]
        if self.names:
            by_name: dict[str, list[str]] = {}
            for name, url in zip(self.names, urls, strict=True):
                by_name.setdefault(name, []).append(url)
            words = [f"{name}={','.join(own)}" for name, own in by_name.items()]
            return dataclasses.replace(args, opd_teacher_urls=words, rm_servers_replaced=args.use_fault_tolerance)
        if not urls:
            return args
        return dataclasses.replace(args, rm_url=",".join(urls), rm_servers_replaced=args.use_fault_tolerance)

    async def watch(self, others: Awaitable[str]) -> str:
        """The result of `others`, or the message of the first death of a reward server.

        With a `recovery` only of one that cannot be replaced.
        """
        own = [self._give_up()] if self.recovery is not None else [self._watch(one) for one in self.engines]
        watches = [asyncio.ensure_future(others), *(asyncio.ensure_future(watch) for watch in own)]
        done, rest = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        return next(iter(done)).result()

    async def _give_up(self) -> str:
        assert self.recovery is not None
        return f"a server of the {self.role} was lost, responses cannot be scored: {await self.recovery.watch()}"

    async def _watch(self, engine: Engine) -> str:
        end = await engine.watch()
        if self.closing.is_set():
            await asyncio.Event().wait()  # a regular shutdown: `others` has the message
        index = engine.settings.index
        owner = f"{self.role} {self.names[index]}" if self.names else self.role
        return f"the {owner}'s server {index} has ended, responses cannot be scored: {end}"

    async def release_memory(self) -> None:
        """Releases the memory of servers on shared GPUs; no request may be running."""
        if self.shares_gpus:
            recovery = self.recovery
            await (asyncio.to_thread(self.gpu_memory.release) if recovery is None else recovery.release_memory())

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Reallocates their memory of `tags`."""
        if self.shares_gpus:
            memory, recovery = self.gpu_memory, self.recovery
            await (asyncio.to_thread(memory.resume, tags) if recovery is None else recovery.resume_memory(tags))

    async def memory(self) -> dict[str, float]:
        """Resident memory of every server in GiB, by name."""
        results = await asyncio.gather(*(engine.memory() for engine in self.engines))
        return {name: gib for result in results for name, gib in result.items()}

    async def close(self) -> None:
        """Ends every server."""
        self.closing.set()
        await asyncio.gather(*(engine.close() for engine in self.engines))


def _actor_config(args: Arguments, model: ServedModel, launch: Launch) -> EngineActorConfig:
    flag = "--opd-teacher-models" if model.name else "--rm-model"
    check = functools.partial(check_node, args, model=(flag, model.folder))
    return EngineActorConfig(Path(args.run_dir).absolute() / "logs", args.log_level, launch.actor_setup(), check)


def server_settings(args: Arguments, model: ServedModel, index: int, launch: Launch) -> ServerSettings:
    """The settings of server number `index`."""
    options = {**({"enable_weights_cpu_backup": True} if args.rm_colocate else {}), **args.rm_server_options}
    return ServerSettings(
        index=index,
        model_path=str(Path(model.folder).absolute()),
        tensor_parallel_size=model.per_server // int(options.get("pp_size", 1)),
        random_seed=args.rollout_seed + index,
        options=options if args.has_served_teacher else {**options, "is_embedding": True},
        memory_saver=args.rm_colocate,
        cuda=launch.machine.cuda,
        shares_gpus=args.rm_colocate,
        role=ROLES[served_role(args)],
        keeps_port=True,
        bind=launch.bind,
        key=options.get(KEY_OPTION),
    )


@dataclasses.dataclass
class OtherServers:
    """The rollout manager's servers besides the policy's engines; each part may be empty."""

    reward: RewardServers = dataclasses.field(default_factory=lambda: RewardServers([]))
    frozen: FrozenModels = dataclasses.field(default_factory=FrozenModels)

    @classmethod
    async def start(
        cls, args: Arguments, gpus: GpuBundles, launch: Launch, policy: Awaitable[None] | None = None
    ) -> OtherServers:
        """Starts both parts at once; on shared GPUs after the engines of the `policy`."""
        reward = RewardServers.start(args, gpus, launch, policy)
        return cls(*await asyncio.gather(reward, FrozenModels.start(args, gpus, launch, policy)))

    @property
    def engines(self) -> list[Engine]:
        """All servers."""
        return [*self.reward.engines, *self.frozen.engines]

    def reachable(self, args: Arguments) -> Arguments:
        """`args` with the addresses of the servers and routers; it already has that of the policy's router."""
        return self.frozen.reachable(self.reward.reachable(args))

    async def watch(self, policy: Awaitable[str]) -> str:
        """The result of `policy`, or the message of the first death of another server or router."""
        return await self.frozen.watch(self.reward.watch(policy))

    async def memory(self) -> dict[str, float]:
        """Resident memory of every server and router in GiB, by name."""
        return await self.reward.memory() | await self.frozen.memory()

    async def release_memory(self) -> None:
        """Releases the memory of those on shared GPUs."""
        await self.reward.release_memory()
        await self.frozen.release_memory()

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Reallocates their memory of `tags`."""
        await self.reward.resume_memory(tags)
        await self.frozen.resume_memory(tags)

    async def close(self) -> None:
        """Ends all of them."""
        await asyncio.gather(self.reward.close(), self.frozen.close())


class RewardRecovery(FrozenRecovery):
    """Supervises the servers of the reward model or of teachers, whose clients it tells new addresses."""

    _group: RewardServers

    def _publish_servers(self) -> None:
        super()._publish_servers()
        self._group.tell_addresses()


class RunRecovery(EngineRecovery):
    """The recovery of the policy's engines, which also begins, counts and ends that of all other servers."""

    def __init__(
        self,
        flags: HealthConfig,
        group: EngineGroup,
        client: ServerList,
        memory: EngineMemory,
        others: OtherServers,
        **options: Any,
    ) -> None:
        """As `EngineRecovery`; takes over the watch of the other servers too."""
        super().__init__(flags, group, client, memory, **options)
        frozen, reward = others.frozen, others.reward
        frozen.recoveries = {
            name: FrozenRecovery(flags, own, frozen.gpu_memory[name], self._event, self)
            for name, own in frozen.groups.items()
        }
        self._of_others = list(frozen.recoveries.values())
        if reward.engines:
            reward.recovery = RewardRecovery(flags, reward, reward.gpu_memory, self._event, self)
            self._of_others.append(reward.recovery)

    def generation_begins(self) -> None:
        """As `EngineRecovery`."""
        super().generation_begins()
        for recovery in self._of_others:
            recovery.generation_begins()

    async def generation_ends(self) -> None:
        """As `EngineRecovery`."""
        await super().generation_ends()
        for recovery in self._of_others:
            await recovery.generation_ends()

    def take_metrics(self) -> dict[str, float]:
        """The fault counts of all models since the previous call."""
        counts = super().take_metrics()
        for recovery in self._of_others:
            counts = {name: counts[name] + more for name, more in recovery.take_metrics().items()}
        return counts

    async def close(self) -> None:
        """As `EngineRecovery`."""
        for recovery in self._of_others:
            await recovery.close()
        await super().close()
