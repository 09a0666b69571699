"""The parallel layouts in which a rollout is trained on, and how far each ends from plain float64 autograd.

Contains the catalogue of layouts and the three model types that represent all: dense (Qwen3), MoE (Qwen3-MoE) and MLA
(DeepSeek-V3: latent attention, a dense first layer, grouped and shared experts, a routing bias). Used by the tests of
this folder, by benchmarks/layouts.py and by the GPU checks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.data.train_batch import RolloutBatch
from tests import accuracy
from tests.megatron import ranks, reference, tiny
from tests.megatron.launch import RankPool

SETTINGS = reference.ReferenceSettings(
    steps=2,
    per_token=False,
    eps_clip=0.02,
    eps_clip_high=0.03,
    kl_coef=0.1,
    entropy_coef=0.05,
    temperature=0.8,
    lr=2e-3,
    weight_decay=0.1,
    betas=(0.9, 0.95),
    eps=1e-6,
    clip_grad=0.5,
    bias_rate=1e-3,
)
ALL = ("dense", "MoE", "MLA")
EXPERTS = ("MoE", "MLA")


@dataclasses.dataclass(frozen=True)
class Layout:
    """The number of ranks, the flags, and the models (number of layers and types) of a layout."""

    ranks: int
    flags: dict[str, Any]
    layers: int = 2
    kinds: tuple[str, ...] = ALL


TP2 = {"tensor_model_parallel_size": 2}
TP2_SP = TP2 | {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VIRTUAL = PP2 | {"virtual_pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
ETP2 = TP2_SP | {"expert_tensor_parallel_size": 2}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40}
SPREAD = {"use_distributed_optimizer": True}
OVERLAP = SPREAD | {"overlap_grad_reduce": True, "overlap_param_gather": True}


def fsdp(strategy: str) -> dict[str, Any]:
    """Megatron-FSDP; `strategy` is what it divides, the value of --data-parallel-sharding-strategy."""
    return SPREAD | {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy}


def selective(*modules: str) -> dict[str, Any]:
    """Recomputation of these modules."""
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def full(method: str, layers: int) -> dict[str, Any]:
    """Recomputation of whole layers."""
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


ONE_RANK = {
    "1 rank": Layout(1, {}),
    "1 rank, recompute full uniform 1": Layout(1, FULL),
    "1 rank, recompute full uniform 2 of 4": Layout(1, full("uniform", 2), 4),
    "1 rank, recompute full block 1 of 4": Layout(1, full("block", 1), 4),
    "1 rank, recompute core_attn": Layout(1, selective("core_attn")),
    "1 rank, recompute mlp": Layout(1, selective("mlp"), kinds=("dense", "MLA")),
    "1 rank, recompute layernorm": Layout(1, selective("layernorm")),
    "1 rank, recompute moe": Layout(1, selective("moe"), kinds=EXPERTS),
    "1 rank, recompute shared_experts": Layout(1, selective("shared_experts"), kinds=("MLA",)),
    "1 rank, recompute mla_up_proj": Layout(1, selective("mla_up_proj"), kinds=("MLA",)),
    "1 rank, recompute core_attn, mlp, layernorm, shared_experts, mla_up_proj": Layout(
        1, selective("core_attn", "mlp", "layernorm", "shared_experts", "mla_up_proj"), kinds=("MLA",)
    ),
}
TWO_RANKS = {
    "TP2": Layout(2, TP2, kinds=("dense",)),
    "TP2, saved activations distributed": Layout(
        2, TP2 | FULL | {"distribute_saved_activations": True}, kinds=("dense",)
    ),
    "TP2 with sequence parallelism (SP)": Layout(2, TP2_SP),
    "TP2 SP, recompute core_attn, mlp, layernorm": Layout(
        2, TP2_SP | selective("core_attn", "mlp", "layernorm"), kinds=("dense", "MLA")
    ),
    "TP2 SP, recompute moe": Layout(2, TP2_SP | selective("core_attn", "moe"), kinds=EXPERTS),
    "PP2": Layout(2, PP2),
    "PP2, last stage 1 of 4 layers": Layout(2, PP2 | {"decoder_last_pipeline_num_layers": 1}, 4),
    "PP2, first stage 1 of 4 layers": Layout(2, PP2 | {"decoder_first_pipeline_num_layers": 1}, 4),
    "PP2, the loss counts as one of 4 layers": Layout(2, PP2 | {"account_for_loss_in_pipeline_split": True}, 3),
    "PP2, 2 virtual stages each": Layout(2, VIRTUAL, 4),
    "PP2, recompute full block 1": Layout(2, PP2 | full("block", 1), 4),
    "CP2 (zig-zag)": Layout(2, CP2),
    "CP2, recompute core_attn": Layout(2, CP2 | selective("core_attn")),
    "DP2": Layout(2, {}),
    "DP2, distributed optimizer": Layout(2, SPREAD),
    "DP2, distributed optimizer, overlapped": Layout(2, OVERLAP),
    "EP2": Layout(2, EP2, kinds=EXPERTS),
    "EP2, recompute moe": Layout(2, EP2 | selective("moe"), kinds=EXPERTS),
    "EP2, distributed optimizer, overlapped": Layout(2, EP2 | OVERLAP, kinds=EXPERTS),
    "EP2 TP2 SP, deterministic": Layout(2, EP2 | TP2_SP | {"deterministic_mode": True}, kinds=EXPERTS),
    "ETP2 TP2 SP (experts cut)": Layout(2, ETP2, kinds=EXPERTS),
    "EP2 CP2": Layout(2, EP2 | CP2, kinds=EXPERTS),
}
FOUR_RANKS = {
    "TP2 SP PP2": Layout(4, TP2_SP | PP2),
    "TP2 SP CP2": Layout(4, TP2_SP | CP2),
    "TP2 SP DP2": Layout(4, TP2_SP),
    "CP2 PP2": Layout(4, CP2 | PP2),
    "CP2 DP2": Layout(4, CP2),
    "PP2 DP2": Layout(4, PP2),
    "PP2, 2 virtual stages each, DP2, overlapped": Layout(4, VIRTUAL | OVERLAP, 4),
    "PP4": Layout(4, {"pipeline_model_parallel_size": 4}, 4),
    "CP4": Layout(4, {"context_parallel_size": 4}),
    "DP4, distributed optimizer": Layout(4, SPREAD),
    "TP4 SP": Layout(4, {"tensor_model_parallel_size": 4, "sequence_parallel": True}, kinds=("MLA",)),
    "EP2 PP2": Layout(4, EP2 | PP2, kinds=EXPERTS),
    "EP2 DP2 over its copies": Layout(4, EP2, kinds=EXPERTS),
    "EP4": Layout(4, {"expert_model_parallel_size": 4}, kinds=EXPERTS),
    "EP4 TP2 SP DP2": Layout(4, TP2_SP | {"expert_model_parallel_size": 4}, kinds=EXPERTS),
    "ETP2 TP2 SP PP2": Layout(4, ETP2 | PP2, kinds=EXPERTS),
}
EIGHT_RANKS = {
    "TP2 SP PP2 DP2": Layout(8, TP2_SP | PP2),
    "TP2 SP PP2 DP2, all at once": Layout(8, TP2_SP | VIRTUAL | OVERLAP | FULL | DYNAMIC, 4),
    "TP2 SP CP2 PP2": Layout(8, TP2_SP | CP2 | PP2),
    "CP2 PP2 DP2, distributed optimizer": Layout(8, CP2 | PP2 | SPREAD),
    "EP2 PP2 DP4": Layout(8, EP2 | PP2, kinds=EXPERTS),
    "EP4 TP2 SP PP2 DP2, distributed optimizer": Layout(
        8, TP2_SP | PP2 | SPREAD | {"expert_model_parallel_size": 4}, kinds=EXPERTS
    ),
    "EP2 TP2 SP CP2 PP2": Layout(8, EP2 | TP2_SP | CP2 | PP2, kinds=EXPERTS),
}
LAYOUTS: dict[str, Layout] = ONE_RANK | TWO_RANKS | FOUR_RANKS | EIGHT_RANKS

# Layouts of the losses of preferred and of labelled answers, each with its model type: fixed micro-batches have whole
# pairs.
PAIRS = {"micro_batch_size": 2}
PACKED_ON_TWO = "DP2, distributed optimizer, packed, balanced"
OF_ANSWERS: dict[str, tuple[Layout, str]] = {
    "1 rank": (Layout(1, PAIRS), "dense"),
    "1 rank, logits kept": (Layout(1, {"keep_logits": True, "micro_batch_size": 4}), "dense"),
    "DP2": (Layout(2, PAIRS), "dense"),
    PACKED_ON_TWO: (Layout(2, OVERLAP | DYNAMIC | {"balance_data": True}), "dense"),
    "TP2": (Layout(2, TP2 | PAIRS), "dense"),
    "TP2 SP, packed": (Layout(2, TP2_SP | DYNAMIC | FULL), "dense"),
    "PP2": (Layout(2, PP2 | PAIRS), "dense"),
    "PP2 virtual, packed": (Layout(2, VIRTUAL | DYNAMIC, 4), "dense"),
    "CP2, packed": (Layout(2, CP2 | DYNAMIC), "MLA"),
    "EP2, packed": (Layout(2, EP2 | SPREAD | DYNAMIC), "MoE"),
    "DP2, Megatron-FSDP": (Layout(2, fsdp("optim_grads_params") | PAIRS), "dense"),
    "DP2, Megatron-FSDP, packed": (Layout(2, fsdp("optim_grads_params") | DYNAMIC), "dense"),
}


def axes_of(layout: Layout) -> dict[str, bool]:
    """The kinds of parallelism, and whether this layout has them."""
    flags = layout.flags
    tp, pp, cp, ep, etp = (
        flags.get(f"{name}_parallel_size", 1)
        for name in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    )
    sharded = flags.get("use_megatron_fsdp", False)
    return {
        "TP": tp > 1,
        "SP": flags.get("sequence_parallel", False),
        "PP": pp > 1,
        "VPP": "virtual_pipeline_model_parallel_size" in flags,
        "CP": cp > 1,
        # of whole models: not the ranks that share the experts of one, or the weights
        "DP": layout.ranks // (tp * pp * cp) > ep and not sharded,
        "EP": ep > 1,
        "ETP": etp > 1,
        "FSDP": sharded,
    }


def summary_of(some: Collection[Layout]) -> str:
    """Number of layouts, all their kinds of parallelism, number of packed ones: "3: TP SP PP, 1 packed"."""
    axes = [axes_of(layout) for layout in some]
    names = " ".join(name for name in axes[0] if any(own[name] for own in axes))
    packed = sum(layout.flags.get("use_dynamic_batch_size", False) for layout in some)
    return f"{len(some)}{names and ': '}{names}" + (f", {packed} packed" if packed else "")


def of(table: Mapping[str, Any], names: Iterable[str] | None = None) -> dict[str, Layout]:
    """The layouts in a table of tests, or only these `names`; an entry is a layout, or a tuple with one in it."""
    entries = {name: table[name] for name in (names or table)}
    parts = {name: entry if isinstance(entry, tuple) else (entry,) for name, entry in entries.items()}
    return {name: next(part for part in own if isinstance(part, Layout)) for name, own in parts.items()}


@dataclasses.dataclass(frozen=True)
class Differences:
    """Distances of a training run from the reference, each relative to the true value; the worst of its steps.

    `weights` and `gradients` are |actual - true| / |true| of all tensors as one vector, after the last step;
    `gradients` are None if no rank has them in full (with the distributed optimizer).
    """

    loss: float
    grad_norm: float
    weights: float
    gradients: float | None


class Models:
    """Checkpoints of the three model types at several depths, and what float64 makes of a rollout; each made once."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.rollout = tiny.recorded_rollout(seed=5)
        self._truths: dict[Any, reference.ReferenceResult] = {}

    def folder(self, kind: str, layers: int, role: str) -> Path:
        """The Hugging Face folder of "policy" or "reference"."""
        folder = self._folder / f"{kind}-{layers}-{role}"
        return folder if folder.exists() else save(kind, folder, seed=1 if role == "policy" else 2, layers=layers)

    def truth(self, kind: str, layers: int, settings: reference.ReferenceSettings) -> reference.ReferenceResult:
        """The reference result: the rollout trained with transformers and autograd."""
        key = (kind, layers, dataclasses.astuple(settings))
        if key not in self._truths:
            folders = [self.folder(kind, layers, role) for role in ("policy", "reference")]
            self._truths[key] = reference.train(*folders, self.rollout, settings)
        return self._truths[key]

    def peer(self, kind: str, layers: int) -> Differences:
        """The distance of transformers' own bfloat16 from the reference."""
        actual, true = self.truth(kind, layers, BF16_PEER), self.truth(kind, layers, BF16)
        return Differences(
            loss=furthest(actual.losses, true.losses),
            grad_norm=furthest(actual.gradient_norms, true.gradient_norms),
            weights=relative_error(actual.weights, true.weights),
            gradients=relative_error(actual.gradients, true.gradients),
        )

    def args(self, layout: Layout, kind: str, settings: reference.ReferenceSettings = SETTINGS) -> Arguments:
        """The flags of one training run; `settings.rounded` asks for bfloat16."""
        return tiny.tiny_args(
            load=str(self.folder(kind, layout.layers, "policy")),
            ref_load=str(self.folder(kind, layout.layers, "reference")),
            use_kl_loss=True,
            kl_loss_coef=settings.kl_coef,
            kl_loss_type="k3",
            entropy_coef=settings.entropy_coef,
            eps_clip=settings.eps_clip,
            eps_clip_high=settings.eps_clip_high,
            rollout_temperature=settings.temperature,
            calculate_per_token_loss=settings.per_token,
            num_steps_per_rollout=settings.steps,
            bf16=settings.rounded,
            **(model_flags(kind, layout.layers) | layout.flags),
        )


def save(kind: str, folder: Path, *, seed: int, layers: int) -> Path:
    """A Hugging Face folder with random weights."""
    makers: dict[str, Callable[..., Path]] = {
        "dense": tiny.save_qwen3,
        "MoE": tiny.save_qwen3_moe,
        "MLA": tiny.save_deepseek,
    }
    return makers[kind](folder, seed=seed, layers=layers)


def model_flags(kind: str, layers: int) -> dict[str, Any]:
    """The flags of the model, in addition to those of `tiny_args`."""
    if kind == "MLA":
        return tiny.LATENT_FLAGS | {"num_layers": layers, "moe_layer_freq": [0] + [1] * (layers - 1)}
    own = tiny.MOE_FLAGS | {"moe_layer_freq": [1] * layers} if kind == "MoE" else {}
    return own | {"num_layers": layers}


def relative_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """|actual - expected| / |expected|, over all tensors as one vector."""
    assert actual.keys() == expected.keys()
    wrong = sum(float((actual[name].double() - value).square().sum()) for name, value in expected.items())
    return (wrong / sum(float(value.square().sum()) for value in expected.values())) ** 0.5


def furthest(actual: list[float], expected: list[float]) -> float:
    """The largest |actual - expected| / |expected|."""
    return max(abs(one / other - 1) for one, other in zip(actual, expected, strict=True))


def differences(args: Arguments, result: ranks.StepResult, truth: reference.ReferenceResult) -> Differences:
    """The distance of `result` of `args` from `truth`."""
    norms = [step["grad_norm"] for step in result.metrics]
    whole = not args.use_distributed_optimizer
    found = Differences(
        loss=furthest([step["loss"] for step in result.metrics], truth.losses),
        grad_norm=furthest(norms, truth.gradient_norms),
        weights=relative_error(result.main_weights or result.weights, truth.weights),
        gradients=relative_error(result.gradients, truth.gradients) if whole else None,
    )
    accuracy.record("loss", max(found.loss, found.grad_norm))
    accuracy.record("weights", found.weights)
    if found.gradients is not None:
        accuracy.record("gradients", found.gradients)
    return found


# of the whole gradient: a token with nearly equal best experts may be routed to the other one
BF16_GRADIENT = {"dense": 2**-5, "MoE": 2**-3, "MLA": 2**-3}


def within_bf16(found: Differences, kind: str) -> bool:
    """Whether bfloat16 explains the differences: the bound of every layout, stated in docs/parallelism.md.

    Its unit of rounding is 2^-8: loss and gradient norm may be eight of these away. AdamW's first step changes each
    weight by about the learning rate, here a fiftieth of its size, for either sign of a near-zero gradient.
    """
    gradient = found.gradients is None or found.gradients <= BF16_GRADIENT[kind]
    return max(found.loss, found.grad_norm) <= 2**-5 and found.weights <= 0.01 and gradient


def train(pool: RankPool, args: Arguments, rollout: RolloutBatch) -> ranks.StepResult:
    """Rank 0's result; asserts that every rank reports the same numbers."""
    result, *others = pool.run(ranks.train_once, args, rollout)
    for other in others:
        assert other == result.metrics
    return result


def train_each(pool: RankPool, runs: list[tuple[Arguments, RolloutBatch]]) -> list[ranks.StepResult]:
    """As `train`, of several runs in the same ranks: a fraction of the time, since a start takes longer than a run."""
    results, *others = pool.run(ranks.train_each, runs)
    for other in others:
        assert other == [result.metrics for result in results]
    return results


# One step from weights that bfloat16 can hold, in bfloat16 with fp32 main weights; the peer is transformers' own model
# that computes in bfloat16, with float64 sums and a float64 optimizer.
BF16 = dataclasses.replace(SETTINGS, steps=1, rounded=True)
BF16_PEER = dataclasses.replace(BF16, compute_dtype=torch.bfloat16)
