"""The dry run's `Plan`: what a run would do, from checked flags, the machine and the files that it starts from.

It names the SGLang servers (GPUs, model and flags; ports are chosen at start), the schedule of generation, training and
weight updates, the samples in flight at most, the memory of each GPU, and the file and line of every hook, found in the
source without importing it. The GPUs of this machine are asked from
nvidia-smi, where it is installed. Imports no torch.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.machinery
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimrl.arguments.checkpoints import ResumePlan, start_of
from slimrl.arguments.dry_run.memory import (
    EngineMemory,
    EngineSettings,
    GroupMemory,
    engine_memory,
    group_memories,
)
from slimrl.arguments.engine_groups import EnginePlace, engine_places, policy_groups
from slimrl.arguments.flag import FlagSpec
from slimrl.arguments.hf_config import ServedModel, served_models
from slimrl.arguments.layout import Groups, Placement, groups_of, placement
from slimrl.arguments.memory import (
    Batches,
    MicroBatch,
    StageMemory,
    batches,
    critic_memory,
    largest_micro_batch,
    training_memory,
)
from slimrl.arguments.namespace import Arguments, all_flag_specs
from slimrl.arguments.redact import redact_flag
from slimrl.hooks import own_path
from slimrl.models.hf_folder import HfFiles, bytes_per_weight, read_hf_files
from slimrl.models.model_size import active_parameters, selection_biases, total_parameters
from slimrl.models.model_spec import ModelSpec
from slimrl.processes.process_info import GIB, Machine
from slimrl.renamed_modules import current_path


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one GPU in each role; `stages` is empty without training, `engine` None without engines.

    `critic` are the stages of a critic on GPUs of its own; without these, `stages` include it.
    """

    stages: tuple[StageMemory, ...]
    engine: EngineMemory | None
    critic: tuple[StageMemory, ...] = ()

    @property
    def largest_stage(self) -> StageMemory | None:
        """The stage that needs the most."""
        return max(self.stages, key=lambda stage: stage.total, default=None)


def estimate(args: Arguments, *, gpu_bytes: int | None = None, engine: EngineSettings | None = None) -> MemoryPlan:
    """The memory of one GPU in each role, for checked flags.

    `gpu_bytes` is the GPU's memory: without it the engine's KV cache, which takes what is left, is not known.
    `engine` is how the servers keep weights and cache; the default is two bytes per number and what its flags say.
    """
    spec = ModelSpec.from_args(args)
    stages, critic = () if args.debug_rollout_only else training_memory(args), critic_memory(args)
    if args.debug_train_only or not args.rollout_gpus:
        return MemoryPlan(stages, None, critic)
    settings = engine or EngineSettings.of_engine(args.rollout_engine, args.engine_options)
    # of the smallest engines, each GPU of which holds the largest part of the model
    size = min((group.num_gpus_per_engine for group in policy_groups(args)), default=args.rollout_num_gpus_per_engine)
    return MemoryPlan(stages, engine_memory(spec, settings, size, gpu_bytes), critic)


@dataclasses.dataclass(frozen=True)
class Server:
    """One server; `gpus` are positions in the placement. `name` is its index, after the name of a frozen model."""

    name: str
    gpus: range
    seed: int
    log: str
    place: EnginePlace


def servers(args: Arguments, where: Placement) -> list[Server]:
    """Every server, in order: those of the policy first."""
    found, counts = [], Counter[str]()
    places = engine_places(args, where.rollout.start)
    for place in sorted(places, key=lambda place: not place.model.update_weights):
        role = "" if place.model.update_weights else f"_{place.model.name}-"
        index = counts[role]
        counts[role] += 1
        log = f"{args.run_dir}/logs/{args.rollout_engine}{role}{index}.log"
        found.append(Server(f"{role.lstrip('_')}{index}", place.gpus, args.rollout_seed + index, log, place))
    return found


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Options by the engine's own names as flags, for reading: {"dtype": "auto"} is ["--dtype auto"]."""
    words = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        told_value = redact_flag(name, value)
        shown = " ".join(map(str, told_value)) if isinstance(told_value, list | tuple) else str(told_value)
        words.append(flag if value is True else f"{flag} {shown}")
    return words


def server_defaults(words: Sequence[str]) -> dict[str, Any]:
    """`--name=value` words as options by name; a word without a value is True."""
    pairs = (word.removeprefix("--").partition("=") for word in words)
    return {name.replace("-", "_"): value if equals else True for name, equals, value in pairs}


MANY_LAYERS = 10**6  # all of a model that is not trained


@dataclasses.dataclass(frozen=True)
class PlanContext:
    """The machine or cluster of a plan. `nodes` has the GPUs of each node of a running Ray cluster, None without one.

    `server_words` are the default server options on this machine ("--device=cpu"), which the user's options override.
    """

    machine: Machine
    nodes: Sequence[int] | None = None
    server_words: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class GpuMemory:
    """Memory of one GPU (bytes) and its source in words; `shared` if all logical GPUs share one machine's memory."""

    bytes: int
    source: str
    shared: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """The whole plan; `start` is None without training, `hf_files` None if the folder holds no weights."""

    args: Arguments
    entry: str
    surroundings: PlanContext
    spec: ModelSpec
    placement: Placement
    groups: Groups
    batches: Batches
    micro_batch: MicroBatch
    start: ResumePlan | None
    hooks: list[HookLocation]
    servers: list[Server]
    hf_files: HfFiles | None
    total_parameters: int
    active_parameters: int
    checkpoint_elements: int  # what the checkpoint's files must hold
    gpu: GpuMemory | None
    engine_settings: EngineSettings
    memory: MemoryPlan
    group_memory: tuple[GroupMemory, ...]  # of --sglang-config
    reward_weights: tuple[int, ...]  # bytes on each GPU of the reward model or teachers whose servers are started

    @property
    def colocated(self) -> bool:
        """Whether GPUs have both roles."""
        return bool(self.args.colocate and self.placement.train and self.placement.engines)

    @property
    def takes_turns(self) -> bool:
        """Whether each side is offloaded while the other works."""
        return bool(self.args.offload_train and self.args.offload_rollout)


def make_plan(args: Arguments, entry: str, surroundings: PlanContext) -> Plan:
    """The plan of a checked command line. Raises UnreadableFileError if a weights file is broken."""
    spec, groups = ModelSpec.from_args(args), groups_of(args)
    where = placement(args, surroundings.nodes)
    folder = Path(args.hf_checkpoint)
    files = read_hf_files(folder, layers=spec.num_layers, tied=spec.tied)
    gpu = gpu_memory(args, where, surroundings)
    total = total_parameters(spec)
    options = {**server_defaults(surroundings.server_words), **args.engine_options}
    settings = EngineSettings.of_engine(args.rollout_engine, options, bytes_per_weight(folder, files, total))
    settings = settings.with_draft(args.sglang_options)
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
        hooks=hook_locations(args),
        servers=servers(args, where),
        hf_files=files,
        total_parameters=total,
        active_parameters=active_parameters(spec),
        checkpoint_elements=total + selection_biases(spec),
        gpu=gpu,
        engine_settings=settings,
        memory=estimate(args, gpu_bytes=gpu_bytes, engine=settings),
        group_memory=group_memories(args, spec, server_defaults(surroundings.server_words), gpu_bytes),
        reward_weights=tuple(
            _reward_weights(args, model, surroundings) for model in served_models(args) for _ in range(model.gpus)
        ),
    )


def _reward_weights(args: Arguments, model: ServedModel, surroundings: PlanContext) -> int:
    """What a GPU of the model's servers holds of its weights: as in the files, or in the dtype asked for."""
    files = read_hf_files(Path(model.folder), layers=MANY_LAYERS, tied=False)
    if files is None:
        return 0
    options = {**server_defaults(surroundings.server_words), **args.rm_server_options}
    per_element = EngineSettings.from_options(options, weight_bytes=0.0).weight_bytes
    size = files.bytes if not per_element or files.elements is None else int(files.elements * per_element)
    return size // model.per_server


def gpu_memory(args: Arguments, where: Placement, surroundings: PlanContext) -> GpuMemory | None:
    """Memory of one GPU: --gpu-memory-gib, else from nvidia-smi, else this machine's memory / logical GPUs."""
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
    """Rows about the loop; none for a run that only evaluates."""
    args = plan.args
    if args.eval_only:
        return
    if plan.entry != "train_async.py":
        yield "loop", "synchronous: generates, then trains"
        return
    bound = args.max_weight_staleness
    if bound is None or args.debug_train_only:
        yield "loop", "generates one rollout ahead of training"
    else:
        yield "loop", "generates fully asynchronously, during training and across weight updates"
        yield (
            "staleness",
            f"tokens come from weights at most {bound} rollouts older than those they train (--max-weight-staleness)",
        )
        yield "in flight", _in_flight(plan, bound)
    if not args.debug_train_only and not args.debug_rollout_only:
        yield "weight updates", _weight_updates(args)


def _in_flight(plan: Plan, bound: int) -> str:
    """The groups that can still be trained within the bound, and the concurrency of the servers."""
    args, size = plan.args, plan.args.n_samples_per_prompt
    groups = (bound + 1) * args.rollout_batch_size
    servers = len(args.rollout_external_engine_addrs or plan.servers)
    return (
        f"at most {groups * size} samples started and not yet trained: {bound} + 1 rollouts of"
        f" {args.rollout_batch_size} prompts x {size}; groups start while fewer than"
        f" {servers * args.sglang_server_concurrency} requests are in flight ({servers} x --sglang-server-concurrency"
        f" {args.sglang_server_concurrency})"
    )


def _weight_updates(args: Arguments) -> str:
    """The rollouts after which weights are updated, and the effect on requests in flight."""
    interval = args.update_weights_interval
    when = "after every rollout" if interval == 1 else f"after every {interval} rollouts and the last"
    how = (
        "requests in flight continue with the new weights"
        if args.update_weights_in_flight
        else "requests are drained first"
    )
    return f"{when}; {how}"


@dataclasses.dataclass(frozen=True)
class HookLocation:
    """`flag` is the flag (or the evaluation set's entry), `function` its dotted path; `line` is None if not found."""

    flag: str
    function: str
    file: Path
    line: int | None


def hook_locations(args: Arguments) -> list[HookLocation]:
    """Every `--...-path` flag that leads to a module, and the hooks of single evaluation sets."""
    values = vars(args)
    hook_flags: list[tuple[str, str | None]] = []
    for spec in all_flag_specs():
        value = values[spec.dest]
        if _may_name_code(spec, value):
            hook_flags += [(spec.name, path) for path in (value if spec.many else [value])]
    for dataset in args.eval_datasets:
        if dataset.custom_rm_path != args.custom_rm_path:
            hook_flags.append((f"eval set {dataset.name}: custom_rm_path", dataset.custom_rm_path))
        if dataset.custom_generate_function_path != args.custom_generate_function_path:
            path = dataset.custom_generate_function_path
            hook_flags.append((f"eval set {dataset.name}: custom_generate_function_path", path))
    if args.spec is not None:
        hook_flags.append(("--spec", ".".join(args.spec)))
    places = [_place(flag, own_path(path)) for flag, path in hook_flags if path]
    return [place for place in places if place is not None]


def _may_name_code(spec: FlagSpec, value: Any) -> bool:
    """Also false for the default of a flag that is unsupported: nothing of that name is called."""
    unused = spec.not_served is not None and value == spec.default
    return spec.value_type is str and spec.dest.endswith("_path") and not unused


def _place(flag: str, path: str) -> HookLocation | None:
    """None if the value is no dotted path of a module, but for example a file."""
    module, _, name = path.rpartition(".")
    file = _source(module) if module and all(part.isidentifier() for part in path.split(".")) else None
    if file is None:
        return None
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return HookLocation(flag, path, file, node.lineno)
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return HookLocation(flag, path, file, node.lineno)
    return HookLocation(flag, path, file, None)


def _source(module: str) -> Path | None:
    """The file of a module; each package on the way is looked up by its folder, so that none is imported."""
    folders = [*sys.path, str(Path.cwd())]
    spec = None
    for part in current_path(module).split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, folders)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None
