"""Estimates of memory in a plan, beside that of training: of a GPU of a server, and of a node's host memory.

Of servers, from flags alone, and of each group of --sglang-config: SGLang gives weights and KV cache together a fixed
fraction of the GPU (its --mem-fraction-static), vLLM weights, cache and activations (its --gpu-memory-utilization); the
cache is what the weights leave of it, which for vLLM is too much by the activations. The policy's groups follow from
the model flags, others from their own files. A frozen model may be of any family that SGLang serves. Weights are those
of its files; the KV cache is known for the families of slimrl.

Of nodes, with their GPUs, for job files of cluster schedulers. GPUs are exact. Memory is an estimate for the fullest
node: what the plan keeps on the host, which is exact where `StageMemory` is, and constants for the processes
themselves. docs/dry-run.md has the formulas. Training's memory is in `slimrl.arguments.memory`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimrl.arguments.engine_groups import draft_folder, group_flags
from slimrl.arguments.memory import StageMemory
from slimrl.arguments.namespace import Arguments
from slimrl.models.hf_folder import HfFiles, bytes_per_weight, read_hf_files
from slimrl.models.model_size import total_parameters
from slimrl.models.model_spec import ModelSpec
from slimrl.processes.process_info import GIB

if TYPE_CHECKING:
    from slimrl.arguments.dry_run.plan import Plan

# SGLang computes its own where none is given, between 0.8 and 0.95 on the GPUs of today.
ASSUMED_FRACTION = 0.88
VLLM_FRACTION = 0.92  # vLLM 0.27's default
_ELEMENT_BYTES = {"float32": 4.0, "float": 4.0, "bfloat16": 2.0, "float16": 2.0, "half": 2.0, "auto": None}


@dataclasses.dataclass(frozen=True)
class DraftSize:
    """A draft model in a server: bytes of its weights, and its sizes, None for families that slimrl does not know."""

    weights: int
    spec: ModelSpec | None


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """How a server keeps its numbers. `max_tokens` bounds the cache where the user (or the CPU's defaults) did."""

    weight_bytes: float = 2.0  # per element
    cache_bytes: int = 2  # per element
    fraction: float = ASSUMED_FRACTION
    max_tokens: int | None = None
    stages: int = 1  # pipeline stages of a server
    replicas: int = 1  # of the model in a server (vLLM's data parallelism)
    draft: DraftSize | None = None
    fraction_from: str = dataclasses.field(default="", compare=False)  # what set `fraction`, for reading

    @classmethod
    def of_engine(cls, engine: str, options: Mapping[str, Any], weight_bytes: float = 2.0) -> EngineSettings:
        """From the options of a server of `engine` by its own names; `weight_bytes` is what the files say."""
        if engine == "sglang":
            return cls.from_options(options, weight_bytes)
        given = options.get("gpu_memory_utilization")
        names = {"dtype": options.get("dtype", "auto"), "kv_cache_dtype": options.get("kv_cache_dtype", "auto")}
        settings = cls.from_options({**names, "mem_fraction_static": given or VLLM_FRACTION}, weight_bytes)
        origin = "--vllm-gpu-memory-utilization" if given is not None else "vLLM takes"
        replicas = int(options.get("data_parallel_size") or 1)
        return dataclasses.replace(settings, fraction_from=origin, replicas=replicas)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], weight_bytes: float = 2.0) -> EngineSettings:
        """From the --sglang-* options by the server's own names; `weight_bytes` is what the checkpoint's files say."""
        given = _ELEMENT_BYTES.get(str(options.get("dtype", "auto")))
        element = given or weight_bytes
        cache = str(options.get("kv_cache_dtype", "auto"))
        wide = 4 if element >= 4 else 2
        tokens, fraction = options.get("max_total_tokens"), options.get("mem_fraction_static")
        return cls(
            weight_bytes=element,
            cache_bytes=1 if "fp8" in cache else 2 if cache == "bfloat16" else wide,
            fraction=ASSUMED_FRACTION if fraction is None else float(fraction),
            max_tokens=None if tokens is None else int(tokens),
            stages=int(options.get("pp_size") or 1),
            fraction_from="SGLang chooses its part, taken as" if fraction is None else "--sglang-mem-fraction-static",
        )

    def with_draft(self, options: Mapping[str, Any]) -> EngineSettings:
        """With the draft model of a server with these options, if it has one; it is kept as the model is."""
        if (folder := draft_folder(options)) is None:
            return self
        model = _Model.read(Path(folder), None)
        if model.spec is not None:
            weights = int(total_parameters(model.spec) * self.weight_bytes)
        else:
            weights = 0 if model.files is None else model.files.bytes
        return dataclasses.replace(self, draft=DraftSize(weights, model.spec))


@dataclasses.dataclass(frozen=True)
class EngineMemory:
    """One GPU of a server, bytes. `cache` and `tokens` are None if the GPU's memory is not known.

    `draft` is the draft model's part of the `weights`.
    """

    weights: int
    cache_per_token: int
    cache: int | None
    tokens: int | None
    draft: int = 0

    @property
    def total(self) -> int:
        """Weights and KV cache."""
        return self.weights + (self.cache or 0)


def engine_memory(spec: ModelSpec, settings: EngineSettings, gpus: int, gpu_bytes: int | None) -> EngineMemory:
    """Weights divided over a replica's GPUs (norms and the like are not, which is not counted), cache by token.

    A draft model has a cache of its own for every token of the model's.
    """
    gpus //= settings.replicas
    draft = 0 if settings.draft is None else settings.draft.weights // gpus
    weights = int(total_parameters(spec) * settings.weight_bytes) // gpus + draft
    per_token = cache_elements_per_token(spec, gpus, settings.stages) * settings.cache_bytes
    if settings.draft is not None and settings.draft.spec is not None:
        per_token += cache_elements_per_token(settings.draft.spec, gpus) * settings.cache_bytes
    tokens = settings.max_tokens
    if gpu_bytes is not None:
        room = max(int(gpu_bytes * settings.fraction) - weights, 0) // per_token
        tokens = room if tokens is None else min(tokens, room)
    return EngineMemory(weights, per_token, None if tokens is None else tokens * per_token, tokens, draft)


def cache_elements_per_token(spec: ModelSpec, gpus: int, stages: int = 1) -> int:
    """Keys and values of every layer of a stage; with latent attention one vector per layer, whole on every GPU.

    Fewer key/value heads than GPUs are held several times.
    """
    layers = -(-spec.num_layers // stages)
    if spec.latent is not None:
        return layers * (spec.latent.kv_lora_rank + spec.latent.qk_pos_emb_head_dim)
    return layers * 2 * max(spec.num_query_groups * stages // gpus, 1) * spec.kv_channels


_ALL_LAYERS = 10**6


@dataclasses.dataclass(frozen=True)
class GroupMemory:
    """One GPU of one group. `memory` is None if nothing is known of its model, `cache` if its cache is not."""

    model: str
    number: int
    frozen: bool
    gpus: int
    per_server: int
    settings: EngineSettings
    memory: EngineMemory | None
    spec: ModelSpec | None  # None for families that slimrl does not know

    @property
    def name(self) -> str:
        """As in messages."""
        return f"model {self.model}, group {self.number}"

    @property
    def has_cache(self) -> bool:
        """Whether the size of the KV cache is known for its model."""
        return self.memory is not None and self.memory.cache_per_token > 0

    def static(self, gpu_bytes: int) -> int:
        """The part of a GPU that a server takes for weights and cache."""
        return int(gpu_bytes * self.settings.fraction)

    def holds(self, tokens: int, gpu_bytes: int, *, per_server: int, fraction: float) -> bool:
        """Whether a server of `per_server` GPUs with `fraction` of each would have its weights and room for `tokens`.

        Without a known cache the weights decide.
        """
        assert self.memory is not None
        if self.spec is None:
            return self.memory.weights * self.per_server <= gpu_bytes * fraction * per_server
        settings = dataclasses.replace(self.settings, fraction=fraction)
        return (engine_memory(self.spec, settings, per_server, gpu_bytes).tokens or 0) >= tokens


def group_memories(
    args: Arguments, spec: ModelSpec, defaults: Mapping[str, Any], gpu_bytes: int | None
) -> tuple[GroupMemory, ...]:
    """Every group with servers, in the order of the file; none without --sglang-config.

    `spec` is the policy's model; `defaults` are the server's options on this machine. Raises UnreadableFileError if a
    weights file is broken.
    """
    return tuple(_memories(args, spec, defaults, gpu_bytes)) if not args.debug_train_only else ()


def _memories(
    args: Arguments, spec: ModelSpec, defaults: Mapping[str, Any], gpu_bytes: int | None
) -> Iterator[GroupMemory]:
    for model in args.server_models:
        own = _Model.read(Path(model.model_path or args.hf_checkpoint), None if not model.update_weights else spec)
        for number, group in enumerate(model.groups):
            if not group.servers:
                continue
            options = {**defaults, **group_flags(args, model, group).engine_options}
            settings = EngineSettings.from_options(options, own.bytes_per_weight)
            origin = "mem_fraction_static" if "mem_fraction_static" in group.overrides else settings.fraction_from
            settings = dataclasses.replace(settings, fraction_from=origin).with_draft(options)
            size = group.num_gpus_per_engine
            memory = own.memory(settings, size, gpu_bytes)
            frozen = not model.update_weights
            yield GroupMemory(model.name, number, frozen, group.servers * size, size, settings, memory, own.spec)


@dataclasses.dataclass(frozen=True)
class _Model:
    """A served model; `spec` is None for families that slimrl does not know."""

    spec: ModelSpec | None
    files: HfFiles | None
    bytes_per_weight: float

    @classmethod
    def read(cls, folder: Path, spec: ModelSpec | None) -> _Model:
        """From its folder; `spec` if it is known already."""
        spec = spec or _spec(folder)
        layers = _ALL_LAYERS if spec is None else spec.num_layers
        files = read_hf_files(folder, layers=layers, tied=spec is not None and spec.tied)
        per_weight = 2.0 if spec is None else bytes_per_weight(folder, files, total_parameters(spec))
        return cls(spec, files, per_weight)

    def memory(self, settings: EngineSettings, size: int, gpu_bytes: int | None) -> EngineMemory | None:
        """That of a GPU of a server of `size` GPUs."""
        if self.spec is not None:
            return engine_memory(self.spec, settings, size, gpu_bytes)
        return None if self.files is None else EngineMemory(self.files.bytes // size, 0, None, None)


def _spec(folder: Path) -> ModelSpec | None:
    try:
        return ModelSpec.from_hf_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError):  # another family, or a variant that cannot be trained
        return None


# Resident memory of a process without tensors of the model: Python, torch, CUDA's context, staging buffers.
RANK_BYTES = 8 * GIB
SERVER_BYTES_PER_GPU = 8 * GIB
# Ray's processes, the driver and the rollout manager with its samples; on every node, since any can be the head.
NODE_BYTES = 24 * GIB
# NCCL's buffers between the processes of a node, and Ray's object store, through which the samples pass.
SHARED_BYTES_PER_GPU = 2 * GIB
SHARED_BYTES_PER_NODE = 16 * GIB


@dataclasses.dataclass(frozen=True)
class NodeResources:
    """`memory_bytes` is that of the fullest node and includes `shared_memory_bytes`, the size of /dev/shm."""

    nodes: int
    gpus_per_node: int
    memory_bytes: int
    shared_memory_bytes: int

    def write(self, path: Path) -> None:
        """Writes the fields as a JSON object."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> NodeResources:
        """What `write` has written."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def node_resources(plan: Plan) -> NodeResources:
    """The resources of the nodes of a plan; every node is given those of the fullest one."""
    where = plan.placement
    nodes = where.nodes_of(range(where.total))
    gpus = max((where.on_node(node) for node in nodes), default=0)
    shared = SHARED_BYTES_PER_NODE + gpus * SHARED_BYTES_PER_GPU
    trained = _rank_bytes(plan, where.train, plan.memory.stages)
    trained |= _rank_bytes(plan, where.critic, plan.memory.critic)
    kept = _frozen_weights(plan)
    on_nodes = []
    for node in nodes:
        ranks = sum(size for position, size in trained.items() if where.places[position].node == node)
        servers = sum(where.shares(gpus_of).get(node, 0) for gpus_of in (*where.engines, *where.frozen, *where.reward))
        frozen = sum(where.shares(gpus_of).get(node, 0) * size for gpus_of, size in kept)
        on_nodes.append(ranks + servers * SERVER_BYTES_PER_GPU + frozen)
    return NodeResources(len(nodes), gpus, NODE_BYTES + shared + max(on_nodes, default=0), shared)


def _frozen_weights(plan: Plan) -> list[tuple[range, int]]:
    """GPUs of each frozen model's server, and its weights on one of them: in host memory while training runs."""
    if not plan.args.offload_rollout:
        return []
    sizes = {(one.model, one.number): one.memory.weights for one in plan.group_memory if one.frozen and one.memory}
    places = ((server.gpus, server.place) for server in plan.servers)
    return [(gpus, sizes.get((place.model.name, place.group_index), 0)) for gpus, place in places]


def _rank_bytes(plan: Plan, positions: range, stages: Sequence[StageMemory]) -> dict[int, int]:
    """Host memory of each training rank at these positions; ranks of a pipeline stage follow each other."""
    if not stages:
        return {}
    of_stage = []
    for stage in stages:
        state = stage.weights + stage.optimizer + stage.critic
        # parked while engines generate; written behind
        copies = bool(plan.args.offload_train) + bool(plan.args.async_save)
        of_stage.append(RANK_BYTES + stage.host + copies * state)
    per_stage = len(positions) // len(stages)
    return {position: of_stage[rank // per_stage] for rank, position in enumerate(positions)}
