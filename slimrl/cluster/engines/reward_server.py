"""The servers of --rm-model: SGLang beside the policy's engines, on dedicated GPUs or with --rm-colocate on theirs.

The model is a reward model, or with `--use-opd --opd-type sglang` the teacher, a language model; `--opd-teacher-models`
has several.

The rollout manager owns them. They start and end with the engines; the death of one ends the run with a message that
names it. They have no router and receive no weight updates. On shared GPUs their memory is released and resumed with
that of the engines; the server then restores its weights from host memory.
`servable_folder` adds the zero bias that SGLang's Qwen2 and Qwen3 sequence classifiers expect and those of transformers
lack. Without it the bias keeps its random initial value, which shifts every reward by a different amount on each
server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from collections.abc import Awaitable
from pathlib import Path

import numpy
from safetensors.numpy import save_file

from slimrl.arguments import Arguments
from slimrl.arguments.served_models import TOKEN_CLASSIFIERS, RewardModelConfig, ServedModel, served_models, served_role
from slimrl.cluster.engines.engine import Engine, EngineActorConfig, ServerSettings
from slimrl.cluster.launch import Launch
from slimrl.cluster.placement import GpuBundles
from slimrl.engines.http import KEY_OPTION
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
    gpu_memory: EngineMemory = dataclasses.field(default_factory=lambda: EngineMemory([]))  # released during training
    closing: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @classmethod
    async def start(
        cls, args: Arguments, gpus: GpuBundles, launch: Launch, policy: Awaitable[None] | None = None
    ) -> RewardServers:
        """Starts every server and waits until all respond. Raises ProcessStartError if one dies.

        On shared GPUs it first waits for the engines of the `policy`: each takes a fraction of the memory that is free.
        """
        if not gpus.reward_engines:
            return cls([])
        config = EngineActorConfig(
            Path(args.run_dir).absolute() / "logs", args.log_level, launch.environment, Path.cwd()
        )
        of_servers = [model for model in served_models(args) for _ in range(model.gpus // model.per_server)]
        if not args.has_served_teacher:  # one model
            folder = Path(of_servers[0].folder).absolute()
            architecture = RewardModelConfig.read(folder).architecture
            links = Path(args.run_dir).absolute() / "rm_model"
            servable = str(await asyncio.to_thread(servable_folder, folder, architecture, links))
            of_servers = [dataclasses.replace(model, folder=servable) for model in of_servers]
        engines = [
            Engine(server_settings(args, model, index, launch), parts, gpus, config)
            for index, (model, parts) in enumerate(zip(of_servers, gpus.reward_engines, strict=True))
        ]
        if args.rm_colocate and policy is not None:
            await policy
        await asyncio.gather(*(engine.start(READY_TIMEOUT_S) for engine in engines))
        released = [engine.control() for engine in engines] if args.rm_colocate else []
        names = tuple(model.name for model in of_servers if model.name)
        return cls(engines, served_role(args), names, EngineMemory(released))

    def reachable(self, args: Arguments) -> Arguments:
        """`args` with the servers' URLs as `--rm-url`, or as `--opd-teacher-urls`, if there are servers."""
        urls = [engine.url for engine in self.engines]
        if self.names:
            by_name: dict[str, list[str]] = {}
            for name, url in zip(self.names, urls, strict=True):
                by_name.setdefault(name, []).append(url)
            words = [f"{name}={','.join(own)}" for name, own in by_name.items()]
            return dataclasses.replace(args, opd_teacher_urls=words)
        return dataclasses.replace(args, rm_url=",".join(urls)) if urls else args

    async def watch(self, others: Awaitable[str]) -> str:
        """The result of `others`, or the message of the first death of a reward server."""
        watches = [asyncio.ensure_future(others), *(asyncio.ensure_future(self._watch(one)) for one in self.engines)]
        done, rest = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        return next(iter(done)).result()

    async def _watch(self, engine: Engine) -> str:
        end = await engine.watch()
        if self.closing.is_set():
            await asyncio.Event().wait()  # a regular shutdown: `others` has the message
        index = engine.settings.index
        owner = f"{self.role} {self.names[index]}" if self.names else self.role
        return f"the {owner}'s server {index} has ended, responses cannot be scored: {end}"

    async def memory(self) -> dict[str, float]:
        """Resident memory of every server in GiB, by name."""
        results = await asyncio.gather(*(engine.memory() for engine in self.engines))
        return {name: gib for result in results for name, gib in result.items()}

    async def close(self) -> None:
        """Ends every server."""
        self.closing.set()
        await asyncio.gather(*(engine.close() for engine in self.engines))


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
        bind=launch.bind,
        key=options.get(KEY_OPTION),
    )
