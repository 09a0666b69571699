"""`Arguments`: the one flat namespace that train.py, the actors and every hook receive.

It inherits each flag group, adds what is computed from the flags, and holds plain data only, so that it pickles.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from slimrl.arguments.flag import FlagSpec, flag_specs
from slimrl.arguments.groups.algorithm import AlgorithmArguments
from slimrl.arguments.groups.attention import AttentionArguments
from slimrl.arguments.groups.checkpoint import CheckpointArguments
from slimrl.arguments.groups.cluster import ClusterArguments
from slimrl.arguments.groups.data import DataArguments
from slimrl.arguments.groups.debug import DebugArguments
from slimrl.arguments.groups.distillation import DistillationArguments
from slimrl.arguments.groups.engine import EngineArguments
from slimrl.arguments.groups.evaluation import EvalArguments
from slimrl.arguments.groups.gradients import GradientArguments
from slimrl.arguments.groups.kernels import KernelArguments
from slimrl.arguments.groups.logging import LoggingArguments
from slimrl.arguments.groups.model import ModelArguments
from slimrl.arguments.groups.moe import MoeArguments
from slimrl.arguments.groups.multi_token import MultiTokenArguments
from slimrl.arguments.groups.offload import OffloadArguments
from slimrl.arguments.groups.optimizer import OptimizerArguments
from slimrl.arguments.groups.other_models import OtherModelArguments
from slimrl.arguments.groups.parallel import ParallelArguments
from slimrl.arguments.groups.positions import PositionArguments
from slimrl.arguments.groups.precision import PrecisionArguments
from slimrl.arguments.groups.profiling import ProfilingArguments
from slimrl.arguments.groups.prometheus import PrometheusArguments
from slimrl.arguments.groups.reward import RewardArguments
from slimrl.arguments.groups.rollout import RolloutArguments
from slimrl.arguments.groups.train_batch import TrainBatchArguments
from slimrl.arguments.groups.wandb import WandbArguments
from slimrl.arguments.groups.weight_update import WeightUpdateArguments


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
    rm_type: str | None
    custom_rm_path: str | None
    reward_key: str | None
    custom_generate_function_path: str | None
    metadata_overrides: dict[str, Any]


@dataclasses.dataclass
class DerivedArguments:
    """What no flag sets directly: computed after parsing by `derive`."""

    sglang_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    router_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    eval_datasets: list[EvalDataset] = dataclasses.field(default_factory=list)
    run_dir: str = ""
    engine_context_len: int | None = None  # tokens of prompt and response that an engine takes, where that is known
    data_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    custom: dict[str, Any] = dataclasses.field(default_factory=dict)  # settings of the user's hooks, from a file
    notes: list[str] = dataclasses.field(default_factory=list)  # sentences worth a log line at the start


@dataclasses.dataclass
class Arguments(
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
    DistillationArguments,
    OptimizerArguments,
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

    Settings of the user's own (`custom`), and the engines' and the router's flags that were given, are read as
    attributes too where no flag has that name: so functions written for slime know them.
    """

    def __getattr__(self, name: str) -> Any:
        given = self.__dict__  # empty while an object is unpickled
        for field, prefix in (("custom", ""), ("sglang_options", "sglang_"), ("router_options", "router_")):
            key = name.removeprefix(prefix)
            if name.startswith(prefix) and key in given.get(field, ()):
                return given[field][key]
        mend = "put it under custom: in the file of --custom-config-path"
        if name.startswith(("sglang_", "router_")):
            mend = f"give --{name.replace('_', '-')}"
        raise AttributeError(f"args.{name} is no flag and was not given: {mend}", name=name, obj=self)

    @property
    def prompts_trained_per_rollout(self) -> int:
        """Groups that a rollout brings to training, `--rollout-batch-size` but for a subsampled replay."""
        part = self.load_debug_rollout_data_subsample
        return self.rollout_batch_size if part is None else max(1, int(self.rollout_batch_size * part))

    @property
    def run_path(self) -> Path:
        """`run_dir` as a Path."""
        return Path(self.run_dir)


# in the order of docs/flags.md
GROUPS: tuple[type, ...] = tuple(group for group in Arguments.__bases__ if group is not DerivedArguments)


def all_flag_specs() -> list[FlagSpec]:
    """Every declared flag, group by group."""
    return [spec for group in GROUPS for spec in flag_specs(group)]
