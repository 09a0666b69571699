"""`Arguments`: the one flat namespace that train.py, the actors and every hook receive.

It inherits each flag group, adds what is computed from the flags, and holds plain data only, so that it pickles. `Rule`
and `Context` are the types of the rules about it, which are in `arguments/validation/`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from slimrl.arguments.engine_groups import ServerModel
from slimrl.arguments.flag import FlagSpec, Problem, flag_specs
from slimrl.arguments.flags.algorithm import AlgorithmArguments
from slimrl.arguments.flags.checkpoint import CheckpointArguments
from slimrl.arguments.flags.critic_and_teacher import CriticArguments, DistillationArguments
from slimrl.arguments.flags.data import DataArguments, TrainBatchArguments
from slimrl.arguments.flags.engine import EngineArguments, WeightUpdateArguments
from slimrl.arguments.flags.kernels import KernelArguments, PrecisionArguments
from slimrl.arguments.flags.logging import (
    DebugArguments,
    LoggingArguments,
    ProfilingArguments,
    PrometheusArguments,
    WandbArguments,
)
from slimrl.arguments.flags.model import (
    AttentionArguments,
    LoraArguments,
    ModelArguments,
    MultiTokenArguments,
    OtherModelArguments,
    PositionArguments,
)
from slimrl.arguments.flags.moe import MoeArguments
from slimrl.arguments.flags.optimizer import OffloadArguments, OptimizerArguments
from slimrl.arguments.flags.parallel import ClusterArguments, GradientArguments, ParallelArguments
from slimrl.arguments.flags.rollout import EvalArguments, RewardArguments, RolloutArguments
from slimrl.data.routed_experts import RoutingShape
from slimrl.models.adapters import AdapterConfig, SharedAdapter
from slimrl.models.families.vision import TowerWeights


@dataclasses.dataclass(frozen=True)
class EvalDataset:
    """One evaluation set with every value resolved: nothing is left to look up elsewhere."""

    name: str
    path: str
    n_samples_per_eval_prompt: int
    temperature: float
    top_p: float
    top_k: int
    max_response_len: int | None
    max_prompt_len: int | None
    max_context_len: int | None
    min_new_tokens: int | None
    repetition_penalty: float | None
    stop: list[str] | None
    stop_token_ids: list[int] | None
    skip_special_tokens: bool
    no_stop_trim: bool
    input_key: str
    label_key: str | None
    metadata_key: str
    tool_key: str
    apply_chat_template: bool
    apply_chat_template_kwargs: dict[str, Any]
    multimodal_keys: dict[str, Any] | None
    rm_type: str | None
    custom_rm_path: str | None
    reward_key: str | None
    custom_generate_function_path: str | None
    metadata_overrides: dict[str, Any]


@dataclasses.dataclass
class DerivedLayout:
    """Values derived from the parallel sizes, computed after parsing by `derive`."""

    data_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None


@dataclasses.dataclass
class DerivedVision:
    """The vision tower of config.json, read after parsing by `derive`; none of a model of text."""

    vision_weights: TowerWeights = ()
    vision_activations: int = 0  # elements that a trained tower keeps for each token of an image
    vision_folder: str | None = None  # the folder with that config.json
    vision_levels: int = 0  # first layers of the decoder that the tower adds features to


@dataclasses.dataclass
class DerivedEngine:
    """Derived values of the engines, computed after parsing by `derive`."""

    sglang_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    vllm_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    router_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    server_models: tuple[ServerModel, ...] = ()  # of --sglang-config; empty: all engines alike
    # host and port of each model's router, of the file's models, once the engines run
    sglang_model_routers: dict[str, tuple[str, int]] = dataclasses.field(default_factory=dict)
    engine_context_len: int | None = None  # tokens of prompt and response that an engine takes, where that is known

    @property
    def trusts_remote_code(self) -> bool:
        """True if the engines, and so the tokenizer, run code of the model's folder."""
        return any(options.get("trust_remote_code") for options in (self.sglang_options, self.vllm_options))


@dataclasses.dataclass
class DerivedRun:
    """The run's paths, computed after parsing by `derive`."""

    run_dir: str = ""
    adapter_owner: str = ""  # of the run's adapters in external servers, known when the run starts


@dataclasses.dataclass
class DerivedArguments(DerivedLayout, DerivedEngine, DerivedVision, DerivedRun):
    """Values that no flag sets directly, computed after parsing by `derive`."""

    eval_datasets: list[EvalDataset] = dataclasses.field(default_factory=list)
    custom: dict[str, Any] = dataclasses.field(default_factory=dict)  # settings of custom hooks, from a file
    # flags of the optimizer with another value for the critic, from --megatron-config-path
    critic_overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    rm_servers_replaced: bool = False  # the run has started those of rm_url or opd_teacher_urls and replaces lost ones
    notes: list[str] = dataclasses.field(default_factory=list)  # sentences worth a log line at the start


@dataclasses.dataclass
class MegatronArguments(
    ModelArguments,
    PositionArguments,
    AttentionArguments,
    MoeArguments,
    MultiTokenArguments,
    PrecisionArguments,
    ParallelArguments,
    GradientArguments,
    OffloadArguments,
    KernelArguments,
    OptimizerArguments,
    LoraArguments,
    OtherModelArguments,
    DerivedLayout,
    DerivedVision,
):
    """The flags of megatron-core's configurations: the model, its layout and its optimizer."""


@dataclasses.dataclass
class SamplingArguments(RolloutArguments, DerivedEngine):
    """The flags of requests to the engines."""


@dataclasses.dataclass
class ConversionArguments(RolloutArguments, DistillationArguments, DerivedVision):
    """The flags of the conversion of samples to training data."""


@dataclasses.dataclass
class PromptArguments(
    SamplingArguments,
    DataArguments,
    RolloutArguments,
    RewardArguments,
    AlgorithmArguments,
    DistillationArguments,
    DebugArguments,
    DerivedEngine,
    DerivedVision,
):
    """The flags of prompt data."""

    @property
    def reads_labelled_answers(self) -> bool:
        """True if a row of preference data is a single answer with its label."""
        return self.reads_pairs and self.trains_on_labels and self.n_samples_per_prompt == 1


@dataclasses.dataclass
class ReportArguments(LoggingArguments, WandbArguments, PrometheusArguments, DerivedEngine, DerivedRun):
    """The flags of reporting."""


# fields whose entries are attributes of `Arguments`, with the prefix of these
_ATTRIBUTES_OF_OPTIONS = (
    ("custom", ""),
    ("sglang_options", "sglang_"),
    ("vllm_options", "vllm_"),
    ("router_options", "router_"),
)
_COMPOSITES = (MegatronArguments, SamplingArguments, ConversionArguments, PromptArguments, ReportArguments)


@dataclasses.dataclass
class Arguments(
    MegatronArguments,
    PromptArguments,
    ConversionArguments,
    ReportArguments,
    ClusterArguments,
    ModelArguments,
    PositionArguments,
    AttentionArguments,
    MoeArguments,
    MultiTokenArguments,
    PrecisionArguments,
    ParallelArguments,
    GradientArguments,
    OffloadArguments,
    KernelArguments,
    CheckpointArguments,
    DataArguments,
    RolloutArguments,
    RewardArguments,
    EvalArguments,
    TrainBatchArguments,
    AlgorithmArguments,
    CriticArguments,
    DistillationArguments,
    OptimizerArguments,
    LoraArguments,
    WeightUpdateArguments,
    EngineArguments,
    LoggingArguments,
    WandbArguments,
    PrometheusArguments,
    DebugArguments,
    ProfilingArguments,
    OtherModelArguments,
    DerivedArguments,
):
    """Every flag and everything derived from them, one attribute each.

    It inherits from every group of flags. A component annotates its parameter with the group that it needs, and mypy
    rejects reads of another. Custom settings (`custom`) and given `--sglang-*`, `--vllm-*` and `--router-*` options are
    also attributes, unless a flag has that name, as functions written for slime expect.
    """

    def __getattr__(self, name: str) -> Any:
        given = self.__dict__  # empty while an object is unpickled
        for field, prefix in _ATTRIBUTES_OF_OPTIONS:
            key = name.removeprefix(prefix)
            if name.startswith(prefix) and key in given.get(field, ()):
                return given[field][key]
        fix = "put it under custom: in the file of --custom-config-path"
        if name.startswith(("sglang_", "vllm_", "router_")):
            fix = f"give --{name.replace('_', '-')}"
        raise AttributeError(f"args.{name} is neither a flag nor a custom setting: {fix}", name=name, obj=self)

    @property
    def prompts_trained_per_rollout(self) -> int:
        """Prompts trained on per rollout: `--rollout-batch-size`, or fewer in a subsampled replay."""
        part = self.load_debug_rollout_data_subsample
        return self.rollout_batch_size if part is None else max(1, int(self.rollout_batch_size * part))

    @property
    def samples_together(self) -> int:
        """Consecutive samples whose loss is computed together, in one micro-batch."""
        return self.n_samples_per_prompt if self.compares_responses else 1

    @property
    def evaluates_held_out(self) -> bool:
        """True if training evaluates held-out pairs or conversations; then no engine evaluates."""
        of_conversations = self.loss_type == "sft_loss" or self.trains_reward_model
        reads = self.reads_pairs or (self.reads_conversations and of_conversations)
        return reads and self.debug_train_only and self.eval_interval is not None

    @property
    def critic_num_gpus(self) -> int:
        """GPUs that train the critic and nothing else; 0 if the policy's ranks train it, or if there is none."""
        nodes, per_node = self.critic_num_nodes, self.critic_num_gpus_per_node
        trains = self.use_critic and not self.eval_only and not self.debug_rollout_only
        return nodes * per_node if trains and nodes is not None and per_node is not None else 0

    @property
    def critic_only_rollouts(self) -> int:
        """Rollouts at the start that do not train the policy."""
        return self.num_critic_only_steps if self.use_critic else 0

    @property
    def broadcasts_weights(self) -> bool:
        """True if weight updates are broadcasts, with --colocate those to the engines on the critic's GPUs."""
        if self.engines_have_adapters:
            return False
        return self.update_weight_transport == "nccl" and (not self.colocate or self.critic_num_gpus > 0)

    @property
    def every_rank_loads_files(self) -> bool:
        """True if the files of weight updates are for servers with slimrl's loader, whose ranks all answer."""
        return self.update_weight_transport == "disk" and not self.uses_vllm and not self.rollout_external_engine_addrs

    @property
    def has_adapters(self) -> bool:
        """True if policy or critic have LoRA adapters."""
        return self.lora_rank is not None or (self.use_critic and self.critic_lora_rank is not None)

    @property
    def engines_have_adapters(self) -> bool:
        """True if the engines serve LoRA adapters beside their base, and weight updates send nothing else."""
        alone = self.debug_rollout_only or self.debug_train_only
        return self.lora_rank is not None and not self.lora_merge and not alone

    @property
    def shared_adapter(self) -> SharedAdapter | None:
        """The names of the run's adapters in external servers, which other runs use, too; None without."""
        adapters = AdapterConfig.from_args(self)
        if adapters is None or not self.engines_have_adapters or not self.rollout_external_engine_addrs:
            return None
        return SharedAdapter(self.lora_name, self.adapter_owner, adapters)

    @property
    def adapter_of_requests(self) -> str | SharedAdapter | None:
        """What the run's requests use in the engines: an adapter of this name, one by version, or None."""
        return (self.shared_adapter or self.lora_name) if self.engines_have_adapters else None

    @property
    def routing_shape(self) -> RoutingShape | None:
        """What the engines return of their routing; None without --use-rollout-routing-replay."""
        if not self.use_rollout_routing_replay or self.num_experts is None:
            return None
        return RoutingShape(self.num_layers, self.moe_router_topk, self.num_experts)

    @property
    def uses_vllm(self) -> bool:
        """True if the rollout's servers are vLLM's, and not SGLang's."""
        return self.rollout_engine == "vllm"

    @property
    def engine_options(self) -> dict[str, Any]:
        """The options of the rollout's servers, by the engine's own names."""
        return self.vllm_options if self.uses_vllm else self.sglang_options

    @property
    def training_num_gpus(self) -> int:
        """GPUs of policy and critic together."""
        return self.actor_num_gpus + self.critic_num_gpus

    @property
    def run_path(self) -> Path:
        """`run_dir` as a Path."""
        return Path(self.run_dir)


# in the order of docs/flags.md
GROUPS: tuple[type, ...] = tuple(
    group for group in Arguments.__bases__ if group is not DerivedArguments and group not in _COMPOSITES
)


def all_flag_specs() -> list[FlagSpec]:
    """Every declared flag, group by group."""
    return [spec for group in GROUPS for spec in flag_specs(group)]


TRAINING_ENTRIES = ("train.py", "train_async.py")


@dataclasses.dataclass(frozen=True)
class Context:
    """`entry` is the program that checks; `given` and `broken` are field names.

    `given` were on the command line; `broken` already have a problem, which a rule about them would only repeat.
    """

    entry: str
    given: frozenset[str] = frozenset()
    broken: frozenset[str] = frozenset()

    @property
    def is_training(self) -> bool:
        """True for the training programs, False for a tool that reads only the model flags."""
        return self.entry in TRAINING_ENTRIES


# A rule yields one problem per violation, and nothing if the values that it needs are missing.
Rule = Callable[[Arguments, Context], Iterable[Problem]]


def absent(path: Path, kind: str = "folder") -> str:
    """Why `path` is not a `kind`, with the part that exists: "does not exist (only /data of it does)"."""
    if path.exists():
        return f"is not a {kind}"
    parent = next((parent for parent in path.absolute().parents if parent.is_dir()), Path("/"))
    return f"does not exist (only {parent} of it does)"


def missing(args: Arguments, context: Context, names: Sequence[str]) -> list[str]:
    """The flags of these fields that were not given, except those with a rejected value."""
    values = vars(args)
    return ["--" + name.replace("_", "-") for name in names if values[name] is None and name not in context.broken]
