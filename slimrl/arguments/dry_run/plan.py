"""The dry run's `Plan`: what a run would do, from checked flags, the machine and the files that it starts from.

It names the SGLang servers (GPUs, model and flags; ports are chosen at start), the schedule of generation, training and
weight updates, the samples in flight at most, and the memory of each GPU. The GPUs of this machine are asked from
nvidia-smi, where it is installed. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimrl.arguments.checkpoints import Start, start_of
from slimrl.arguments.dry_run.batch import Batches, MicroBatch, batches, largest_micro_batch
from slimrl.arguments.dry_run.hook_locations import HookLocation, hook_places
from slimrl.arguments.dry_run.memory import EngineSettings, MemoryPlan, estimate
from slimrl.arguments.layout import Groups, Placement, groups_of, placement
from slimrl.arguments.namespace import Arguments
from slimrl.arguments.redact import told
from slimrl.models.hf_folder import HfFiles, bytes_per_weight, read_hf_files
from slimrl.models.model_spec import ModelSpec
from slimrl.models.parameters import active_parameters, selection_biases, total_parameters
from slimrl.processes.process_info import GIB


@dataclasses.dataclass(frozen=True)
class Server:
    """One SGLang server; `gpus` are positions in the placement."""

    index: int
    gpus: range
    seed: int
    log: str


def servers(args: Arguments, where: Placement) -> list[Server]:
    """Every server, in order."""
    return [
        Server(index, gpus, args.rollout_seed + index, f"{args.run_dir}/logs/sglang{index}.log")
        for index, gpus in enumerate(where.engines)
    ]


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Options by the engine's own names as flags, for reading: {"dtype": "auto"} is ["--dtype auto"]."""
    words = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        told_value = told(name, value)
        shown = " ".join(map(str, told_value)) if isinstance(told_value, list | tuple) else str(told_value)
        words.append(flag if value is True else f"{flag} {shown}")
    return words


def server_defaults(words: Sequence[str]) -> dict[str, Any]:
    """`--name=value` words as options by name; a word without a value is True."""
    pairs = (word.removeprefix("--").partition("=") for word in words)
    return {name.replace("-", "_"): value if equals else True for name, equals, value in pairs}


_QUERY = ("--query-gpu=memory.total", "--format=csv,noheader,nounits")
_TIMEOUT_S = 20
_MEMINFO = Path("/proc/meminfo")
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclasses.dataclass(frozen=True)
class Machine:
    """Bytes of each GPU, and of the memory that processes here may use (None where the system does not say)."""

    gpus: tuple[int, ...]
    host: int | None


def this_machine() -> Machine:
    """Looks once; a driver that does not answer counts as no GPU."""
    return Machine(_gpus(), _host())


def _gpus() -> tuple[int, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        done = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    words = done.stdout.split()
    if done.returncode != 0 or not all(word.isdigit() for word in words):
        return ()
    return tuple(int(word) * 2**20 for word in words)


def _host() -> int | None:
    """Physical memory, or the container's limit where that is lower."""
    if not _MEMINFO.is_file():
        return None
    total = next((line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemTotal:")), None)
    if total is None:
        return None
    physical = int(total.split()[1]) * 1024
    limit = _CONTAINER_LIMIT.read_text().strip() if _CONTAINER_LIMIT.is_file() else "max"
    return min(physical, int(limit)) if limit.isdigit() else physical


MANY_LAYERS = 10**6  # all of a model that is not trained


@dataclasses.dataclass(frozen=True)
class PlanContext:
    """What a plan is made for. `nodes` has the GPUs of each node of a running Ray cluster, None where there is none.

    `server_words` is what the servers are started with on this machine before anything the user says ("--device=cpu").
    """

    machine: Machine
    nodes: Sequence[int] | None = None
    server_words: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class GpuMemory:
    """Memory of one GPU (bytes), and in words who says so; `shared` where all GPUs draw on one machine's memory."""

    bytes: int
    source: str
    shared: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """The whole plan; `start` is None without training, `hf_files` None where the folder holds no weights."""

    args: Arguments
    entry: str
    surroundings: PlanContext
    spec: ModelSpec
    placement: Placement
    groups: Groups
    batches: Batches
    micro_batch: MicroBatch
    start: Start | None
    hooks: list[HookLocation]
    servers: list[Server]
    hf_files: HfFiles | None
    total_parameters: int
    active_parameters: int
    checkpoint_elements: int  # what the checkpoint's files must hold
    gpu: GpuMemory | None
    engine_settings: EngineSettings
    memory: MemoryPlan
    reward_weights: int | None  # of one GPU of the reward model, bytes; None without one that is started

    @property
    def colocated(self) -> bool:
        """Whether a GPU has both roles."""
        return bool(self.args.colocate and self.placement.train and self.placement.engines)

    @property
    def takes_turns(self) -> bool:
        """Whether one role leaves the GPU's memory while the other works."""
        return bool(self.args.offload_train and self.args.offload_rollout)


def make_plan(args: Arguments, entry: str, surroundings: PlanContext) -> Plan:
    """The plan of a checked command line. Raises UnreadableFileError where a weights file is broken."""
    spec, groups = ModelSpec.from_args(args), groups_of(args)
    where = placement(args, surroundings.nodes)
    folder = Path(args.hf_checkpoint)
    files = read_hf_files(folder, layers=spec.num_layers, tied=spec.tied)
    gpu = gpu_memory(args, where, surroundings)
    total = total_parameters(spec)
    options = {**server_defaults(surroundings.server_words), **args.sglang_options}
    settings = EngineSettings.from_options(options, weight_bytes=bytes_per_weight(folder, files, total))
    gpu_bytes = None if gpu is None or gpu.shared else gpu.bytes
    return Plan(
        args=args,
        entry=entry,
        surroundings=surroundings,
        spec=spec,
        placement=where,
        groups=groups,
        batches=batches(args, groups),
        micro_batch=largest_micro_batch(args, groups),
        start=None if args.debug_rollout_only else start_of(args),
        hooks=hook_places(args),
        servers=servers(args, where),
        hf_files=files,
        total_parameters=total,
        active_parameters=active_parameters(spec),
        checkpoint_elements=total + selection_biases(spec),
        gpu=gpu,
        engine_settings=settings,
        memory=estimate(args, gpu_bytes=gpu_bytes, engine=settings),
        reward_weights=_reward_weights(args, args.rm_model, surroundings) if where.reward and args.rm_model else None,
    )


def _reward_weights(args: Arguments, folder: str, surroundings: PlanContext) -> int:
    """What a GPU of the reward model's servers holds of its weights: as in the files, or in the dtype asked for."""
    files = read_hf_files(Path(folder), layers=MANY_LAYERS, tied=False)
    if files is None:
        return 0
    options = {**server_defaults(surroundings.server_words), **args.rm_server_options}
    per_element = EngineSettings.from_options(options, weight_bytes=0.0).weight_bytes
    size = files.bytes if not per_element or files.elements is None else int(files.elements * per_element)
    return size // args.rm_num_gpus_per_engine


def gpu_memory(args: Arguments, where: Placement, surroundings: PlanContext) -> GpuMemory | None:
    """What one GPU has: as --gpu-memory-gib says, else a GPU, else this machine's memory by its GPUs."""
    machine = surroundings.machine
    if args.gpu_memory_gib is not None:
        return GpuMemory(int(args.gpu_memory_gib * GIB), "--gpu-memory-gib", shared=False)
    if machine.gpus:
        return GpuMemory(min(machine.gpus), "nvidia-smi", shared=False)
    if machine.host is None or where.total == 0:
        return None
    here = where.total if surroundings.nodes is None else max(where.on_node(place.node) for place in where.places)
    return GpuMemory(machine.host // here, f"this machine's {machine.host / GIB:.1f} GiB / {here} GPUs", shared=True)


def loop_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """From checked flags; none where nothing is trained."""
    args = plan.args
    if args.only_evaluates:
        return
    if plan.entry != "train_async.py":
        yield "loop", "generates, trains, in turns"
        return
    bound = args.max_weight_staleness
    if bound is None or args.debug_train_only:
        yield "loop", "generates one rollout ahead of training"
    else:
        yield "loop", "generates fully asynchronously, beside training and across weight updates"
        yield (
            "staleness",
            f"no token is trained whose weights are more than {bound} rollouts older than those it trains"
            " (--max-weight-staleness)",
        )
        yield "in progress", _under_way(plan, bound)
    if not args.debug_train_only and not args.debug_rollout_only:
        yield "weight_updates", _weight_updates(args)


def _under_way(plan: Plan, bound: int) -> str:
    """Groups that can still be trained in time, and what the servers take at once."""
    args, size = plan.args, plan.args.n_samples_per_prompt
    groups = (bound + 1) * args.rollout_batch_size
    servers = len(args.rollout_external_engine_addrs or plan.servers)
    return (
        f"at most {groups * size} samples begun and not yet trained: {bound} + 1 rollouts of"
        f" {args.rollout_batch_size} prompts x {size}; groups begin while fewer than"
        f" {servers * args.sglang_server_concurrency} requests run ({servers} x --sglang-server-concurrency"
        f" {args.sglang_server_concurrency})"
    )


def _weight_updates(args: Arguments) -> str:
    """After which rollouts, and what happens to requests that run then."""
    interval = args.update_weights_interval
    when = "after every rollout" if interval == 1 else f"after every {interval} rollouts and the last"
    how = "requests that run continue with the new weights" if args.update_weights_in_flight else "no request runs then"
    return f"{when}; {how}"
