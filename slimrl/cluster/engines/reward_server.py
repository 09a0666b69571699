"""The servers of --rm-model: SGLang beside the policy's engines, on dedicated GPUs or with --rm-colocate on theirs.

The model is a reward model, or with `--use-opd --opd-type sglang` the teacher, a language model.

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
from slimrl.arguments.served_models import RewardModelConfig, served_role
from slimrl.cluster.engines.engine import Engine, EngineActorConfig, ServerSettings
from slimrl.cluster.launch import Launch
from slimrl.cluster.placement import GpuBundles
from slimrl.engines.http import KEY_OPTION
from slimrl.engines.server_protocol import EngineMemory
from slimrl.models.hf_folder import INDEX, read_tensor_names

BIASED = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")
BIAS = "score.bias"
BIAS_FILE = "score-bias.safetensors"


def servable_folder(model: Path, architecture: str, into: Path) -> Path:
    """`model` itself if it needs no bias, else `into`, recreated with links to its files and the zero bias.

    Raises ValueError if its weights are not in safetensors files, which the bias is added to.
    """
    if architecture not in BIASED:
        return model
    names = read_tensor_names(model)
    if BIAS in names:
        return model
    if not names:
        raise ValueError(f"--rm-model {model} has no safetensors files: save it again with safetensors")
    if into.exists():  # from an earlier start under the same run name, perhaps with another model
        shutil.rmtree(into)
    into.mkdir(parents=True)
    for file in model.iterdir():
        if file.name != INDEX:
            (into / file.name).symlink_to(file.resolve())
    save_file({BIAS: numpy.zeros(1, numpy.float32)}, into / BIAS_FILE)
    index = model / INDEX
    if index.is_file():
        content = json.loads(index.read_text())
        content["weight_map"][BIAS] = BIAS_FILE
        (into / INDEX).write_text(json.dumps(content))
    return into


READY_TIMEOUT_S = 900.0
ROLES = {"reward model": "_reward", "teacher": "_teacher"}  # in the names of logs


@dataclasses.dataclass
class RewardServers:
    """Running servers; empty without a model to serve or with an external one."""

    engines: list[Engine]
    role: str = "reward model"
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
        model = Path(args.rm_model).absolute()
        if not args.has_served_teacher:
            architecture = RewardModelConfig.read(model).architecture
            links = Path(args.run_dir).absolute() / "rm_model"
            model = await asyncio.to_thread(servable_folder, model, architecture, links)
        engines = [
            Engine(server_settings(args, model, index, launch), parts, gpus, config)
            for index, parts in enumerate(gpus.reward_engines)
        ]
        if args.rm_colocate and policy is not None:
            await policy
        await asyncio.gather(*(engine.start(READY_TIMEOUT_S) for engine in engines))
        released = [engine.control() for engine in engines] if args.rm_colocate else []
        return cls(engines, served_role(args), EngineMemory(released))

    def reachable(self, args: Arguments) -> Arguments:
        """`args` with the servers' URLs as `--rm-url`, if there are servers."""
        urls = [engine.url for engine in self.engines]
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
        return f"the {self.role}'s server {engine.settings.index} has ended, responses cannot be scored: {end}"

    async def memory(self) -> dict[str, float]:
        """Resident memory of every server in GiB, by name."""
        results = await asyncio.gather(*(engine.memory() for engine in self.engines))
        return {name: gib for result in results for name, gib in result.items()}

    async def close(self) -> None:
        """Ends every server."""
        self.closing.set()
        await asyncio.gather(*(engine.close() for engine in self.engines))


def server_settings(args: Arguments, model: Path, index: int, launch: Launch) -> ServerSettings:
    """The settings of server number `index`."""
    options = {**({"enable_weights_cpu_backup": True} if args.rm_colocate else {}), **args.rm_server_options}
    return ServerSettings(
        index=index,
        model_path=str(model),
        tensor_parallel_size=args.rm_num_gpus_per_engine // int(options.get("pp_size", 1)),
        random_seed=args.rollout_seed + index,
        options=options if args.has_served_teacher else {**options, "is_embedding": True},
        memory_saver=args.rm_colocate,
        cuda=launch.machine.cuda,
        shares_gpus=args.rm_colocate,
        role=ROLES[served_role(args)],
        bind=launch.bind,
        key=options.get(KEY_OPTION),
    )
