"""The flags of every family against config.json: what each key sets, and which models are unsupported."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slimrl.arguments import read_args
from slimrl.arguments.hf_config import MODEL_TYPES, disagreements, stated_flags

ROOT = Path(__file__).resolve().parents[2]


def published(model: str) -> dict[str, Any]:
    """config.json of a model as it is published."""
    return json.loads((ROOT / f"tests/scripts/published_configs/{model}.json").read_text())


def model_args(model: str) -> list[str]:
    """The flags of the model's script."""
    command = f"source {ROOT}/scripts/models/{model}.sh; printf '%s\\n' \"${{MODEL_ARGS[@]}}\""
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.splitlines()


def sentences(model: str, more: str = "", **changes: Any) -> list[str]:
    """Errors for the model's own flags and `more`, with `changes` to config.json (None: no such key)."""
    config = {key: value for key, value in (published(model) | changes).items() if value is not None}
    args, _ = read_args([*model_args(model), *more.split()], entry="convert_hf_to_torch_dist.py")
    return [str(problem) for problem in disagreements(args, config)]


QWEN3, GLM4, GLM45, DEEPSEEK, MOONLIGHT, GLM47 = (
    "qwen3-30B-A3B",
    "glm4-9B",
    "glm4.5-106B-A12B",
    "deepseek-v3",
    "moonlight",
    "glm4.7-30B-A3B",
)

YARN = published(DEEPSEEK)["rope_scaling"]


@pytest.mark.parametrize(
    ("model", "changes", "sentence"),
    [
        (
            QWEN3,
            {"num_experts": 64},
            "--num-experts is 128 and config.json says num_experts 64: give --num-experts 64.",
        ),
        (
            QWEN3,
            {"num_experts": None, "num_local_experts": 64},  # the name that newer transformers write
            "--num-experts is 128 and config.json says num_local_experts 64: give --num-experts 64.",
        ),
        (
            QWEN3,
            {"num_experts_per_tok": 4},
            "--moe-router-topk is 8 and config.json says num_experts_per_tok 4: give --moe-router-topk 4.",
        ),
        (
            QWEN3,
            {"moe_intermediate_size": 1024},
            "--moe-ffn-hidden-size is 768 and config.json says moe_intermediate_size 1024: give --moe-ffn-hidden-size"
            " 1024.",
        ),
        (
            QWEN3,
            {"norm_topk_prob": False},
            "--moe-router-pre-softmax is missing and config.json says norm_topk_prob false: add"
            " --moe-router-pre-softmax.",
        ),
        (
            QWEN3,
            {"mlp_only_layers": [0, 1]},
            "--moe-layer-freq is [1]*48 and config.json says decoder_sparse_step and mlp_only_layers [0]*2+[1]*46: give"
            " --moe-layer-freq [0]*2+[1]*46.",
        ),
        (
            GLM4,
            {"partial_rotary_factor": 0.25},
            "--rotary-percent is 0.5 and config.json says partial_rotary_factor 0.25: give --rotary-percent 0.25.",
        ),
        (
            GLM4,
            {"attention_bias": False},
            "--add-qkv-bias is given and config.json says model_type 'glm4', attention_bias false: leave --add-qkv-bias"
            " out.",
        ),
        (
            GLM45,
            {"first_k_dense_replace": 3},
            "--moe-layer-freq is [0]*1+[1]*45 and config.json says first_k_dense_replace [0]*3+[1]*43: give"
            " --moe-layer-freq [0]*3+[1]*43.",
        ),
        (
            GLM45,
            {"n_shared_experts": 2},
            "--moe-shared-expert-intermediate-size is 1408 and config.json says n_shared_experts x"
            " moe_intermediate_size 2816: give --moe-shared-expert-intermediate-size 2816.",
        ),
        (
            GLM45,
            {"n_shared_experts": None},
            "--moe-shared-expert-intermediate-size is 1408 and config.json says a model without shared experts: leave"
            " --moe-shared-expert-intermediate-size out.",
        ),
        (
            GLM45,
            {"routed_scaling_factor": 2.5},
            "--moe-router-topk-scaling-factor is 1.0 and config.json says routed_scaling_factor 2.5: give"
            " --moe-router-topk-scaling-factor 2.5.",
        ),
        (
            GLM45,
            {"use_qk_norm": True},
            "--qk-layernorm is missing and config.json says use_qk_norm true: add --qk-layernorm.",
        ),
        (
            DEEPSEEK,
            {"kv_lora_rank": 256},
            "--kv-lora-rank is 512 and config.json says kv_lora_rank 256: give --kv-lora-rank 256.",
        ),
        (
            DEEPSEEK,
            {"q_lora_rank": None},
            "--q-lora-rank is 1536 and config.json says queries without a latent vector: leave --q-lora-rank out.",
        ),
        (
            MOONLIGHT,
            {"q_lora_rank": 768},
            "--q-lora-rank is missing and config.json says q_lora_rank 768: give --q-lora-rank 768.",
        ),
        (
            DEEPSEEK,
            {"n_group": 4},
            "--moe-router-num-groups is 8 and config.json says n_group 4: give --moe-router-num-groups 4.",
        ),
        (
            GLM47,  # the keys that transformers writes instead of first_k_dense_replace
            {"first_k_dense_replace": None, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 44},
            "--moe-layer-freq is [0]*1+[1]*46 and config.json says first_k_dense_replace [0]*3+[1]*44:"
            " give --moe-layer-freq [0]*3+[1]*44.",
        ),
        (
            MOONLIGHT,
            {"rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0}},
            "--rotary-scaling-factor is 1.0 and config.json says rope factor 40: give --rotary-scaling-factor 40.",
        ),
    ],
)
def test_mismatched_flag_is_reported_with_both_values(model, changes, sentence):
    assert sentences(model, **changes) == [sentence]


@pytest.mark.parametrize(
    ("model", "changes", "what"),
    [
        (GLM45, {"norm_topk_prob": False}, "norm_topk_prob false"),
        (GLM45, {"num_experts_per_tok": 1}, "num_experts_per_tok 1 with sigmoid scores"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method 'greedy'"),
        (
            DEEPSEEK,
            {"topk_group": 8},
            "num_experts_per_tok 8 of topk_group 8 groups, where only two per group are ranked alike,",
        ),
        (DEEPSEEK, {"attention_bias": True}, "attention_bias true"),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave false"),
        (DEEPSEEK, {"rope_scaling": YARN | {"truncate": False}}, "rope truncate false"),
        (DEEPSEEK, {"rope_scaling": YARN | {"attention_factor": 1.2}}, "rope attention_factor 1.2"),
        (
            DEEPSEEK,
            {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0}},
            "rope mscale 0.707 without mscale_all_dim",
        ),
        (GLM4, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        (QWEN3, {"use_sliding_window": True}, "use_sliding_window true"),
    ],
)
def test_model_outside_the_tables_is_rejected(model, changes, what):
    sentence = f"--hf-checkpoint has {what} in config.json, which is unsupported: use another."
    assert sentence in sentences(model, **changes)


def test_expert_flags_are_rejected_for_a_dense_model():
    assert sentences("qwen3-4B", "--num-experts 8") == [
        "--num-experts is 8 and config.json says a model without experts: leave --num-experts out."
    ]
    assert sentences("qwen3-4B", "--post-mlp-layernorm") == [
        "--post-mlp-layernorm is given and config.json says model_type 'qwen3': leave --post-mlp-layernorm out."
    ]


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (GLM45, "--moe-router-num-groups 1 --moe-router-group-topk 1"),
        (GLM45, "--moe-router-topk-scaling-factor 1.0"),
        (QWEN3, "--moe-layer-freq 1"),
        (GLM47, "--rope-type yarn --rotary-scaling-factor 1"),
        (MOONLIGHT, "--rope-type rope"),
    ],
)
def test_equivalent_spellings_agree(model, more):
    assert sentences(model, more) == []


def test_moe_model_without_expert_flags_reports_the_flags():
    line = [word for word in model_args(QWEN3) if word not in ("--num-experts", "128")]
    args, _ = read_args([*line, "--kv-channels", "128"], entry="convert_hf_to_torch_dist.py")
    assert str(disagreements(args, published(QWEN3))[0]) == (
        "--num-experts is missing and config.json says num_experts 128: give --num-experts 128."
    )


def test_reported_flags_match_the_published_recipe():
    flags = stated_flags(published(DEEPSEEK))
    args, _ = read_args(model_args(DEEPSEEK), entry="convert_hf_to_torch_dist.py")
    said = {field: value for field, value in flags.items() if value is not None}
    given = {field: vars(args)[field] for field in said}
    assert given | {"rope_type": "yarn"} == said
    assert flags["moe_layer_freq"] == [0] * 3 + [1] * 58
    assert flags["moe_shared_expert_intermediate_size"] == 2048


def test_every_family_with_a_flag_table_has_a_weight_table():
    from slimrl.models.families import FAMILIES

    assert {family.model_type for family in FAMILIES} == set(MODEL_TYPES)


def test_unusual_rotary_settings_do_not_crash():
    args, _ = read_args(model_args("qwen3-4B"), entry="convert_hf_to_torch_dist.py")
    assert isinstance(disagreements(args, published("qwen3-4B") | {"rope_scaling": "linear"}), list)
