"""Rules about recomputation: the Qwen3-4B recipe and its variants pass, each violation is one error."""

from __future__ import annotations

import pytest

from slimrl.arguments import read_args

# in the recipe: 36 layers, --recompute-granularity full --recompute-method uniform --recompute-num-layers 1, TP 2
PIPELINE = "--pipeline-model-parallel-size 2 --actor-num-gpus-per-node 8"
FIRST_16 = f"{PIPELINE} --decoder-first-pipeline-num-layers 16"
SELECTIVE = "--recompute-granularity selective"
FULL = ("--recompute-method", "--recompute-num-layers")

GOOD = [
    "--recompute-num-layers 12",
    f"{PIPELINE} --recompute-num-layers 9",
    f"{FIRST_16} --recompute-num-layers 4",
    f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 6 --recompute-num-layers 3",
    "--recompute-method block --recompute-num-layers 36",
    f"{PIPELINE} --recompute-method block --recompute-num-layers 17",
]
BAD = [
    ("--recompute-num-layers 37", "--recompute-num-layers 37 is more than --num-layers 36: lower it."),
    (
        "--recompute-num-layers 8",
        "--recompute-num-layers 8 with --recompute-method uniform does not divide --num-layers 36: choose a divisor,"
        " such as 1.",
    ),
    (
        f"{PIPELINE} --recompute-num-layers 4",
        "--recompute-num-layers 4 with --recompute-method uniform does not divide the 18 consecutive layers of"
        " pipeline stage 0: choose a divisor, such as 1.",
    ),
    (
        f"{FIRST_16} --recompute-num-layers 16",
        "--recompute-num-layers 16 with --recompute-method uniform does not divide the 20 consecutive layers of"
        " pipeline stage 1: choose a divisor, such as 1.",
    ),
    (
        f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 6 --recompute-num-layers 9",
        "--recompute-num-layers 9 with --recompute-method uniform does not divide the 6 consecutive layers of"
        " pipeline stage 0: choose a divisor, such as 1.",
    ),
    (
        SELECTIVE,
        "--recompute-method and --recompute-num-layers belong to --recompute-granularity full: add it, or leave them"
        " out.",
    ),
    (
        "--recompute-modules core_attn mlp",
        "--recompute-modules core_attn mlp belongs to --recompute-granularity selective: add it, or leave the modules"
        " out.",
    ),
    (
        "--distribute-saved-activations",
        "--distribute-saved-activations is redundant, --sequence-parallel already shards these activations: leave it"
        " out.",
    ),
]
MODULES = [
    ("mla_up_proj", "latent attention (--multi-latent-attention)"),
    ("moe", "layers with experts (--num-experts)"),
    ("moe_act", "experts in one grouped product (--moe-grouped-gemm)"),
    ("shared_experts", "a shared expert (--moe-shared-expert-intermediate-size)"),
]
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 64"


def sentences(recipe, more: str, without: tuple[str, ...] = ()) -> list[str]:
    line = recipe.line(more)
    for flag in without:
        place = line.index(flag)
        line = line[:place] + line[place + 2 :]
    _, problems = read_args(line)
    return [str(problem) for problem in problems if "recomp" in str(problem) or "saved" in str(problem)]


@pytest.mark.parametrize("more", GOOD)
def test_units_that_fill_every_stage_are_accepted(recipe, more):
    assert sentences(recipe, more) == []


@pytest.mark.parametrize(("more", "sentence"), BAD)
def test_each_violation_is_one_error(recipe, more, sentence):
    assert sentences(recipe, more) == [sentence]


def test_modules_of_a_dense_model_are_accepted(recipe):
    assert sentences(recipe, f"{SELECTIVE} --recompute-modules core_attn mlp layernorm", FULL) == []


@pytest.mark.parametrize(("module", "what"), MODULES)
def test_module_missing_from_the_model_is_rejected(recipe, module, what):
    assert sentences(recipe, f"{SELECTIVE} --recompute-modules {module}", FULL) == [
        f"--recompute-modules {module} recomputes {what} and there is none: leave it out."
    ]


def test_expert_modules_are_accepted_for_moe_models_and_dense_modules_are_not(recipe):
    experts = f"{EXPERTS} --moe-grouped-gemm --moe-shared-expert-intermediate-size 64 {SELECTIVE} --recompute-modules"
    assert sentences(recipe, f"{experts} moe moe_act shared_experts", FULL) == []
    assert sentences(recipe, f"{experts} mlp", FULL) == [
        "--recompute-modules mlp recomputes a layer without experts (--moe-layer-freq) and there is none: leave it out."
    ]
    assert sentences(recipe, f"--moe-layer-freq [0]*1+[1]*35 {experts} mlp", FULL) == []
    assert sentences(recipe, f"{experts} shared_experts --moe-shared-expert-overlap", FULL) == [
        "--recompute-modules shared_experts and --moe-shared-expert-overlap exclude each other: leave one out."
    ]


def test_saved_activations_are_distributed_only_over_existing_gpus(recipe):
    without = ("--tensor-model-parallel-size",)
    assert sentences(recipe, "--distribute-saved-activations", without) == [
        "--distribute-saved-activations needs --recompute-granularity full and --tensor-model-parallel-size above 1:"
        " add the missing one, or leave the flag out."
    ]
