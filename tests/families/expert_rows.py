"""Toy models of families with routed experts and ordinary attention."""

from __future__ import annotations

from typing import Any

from tests.families.dense_rows import LEVELS
from tests.families.shapes import DENSE, GROUPED, SIGMOID, UNTIED, flags, moe_flags

ROWS: dict[str, dict[str, Any]] = {
    "qwen2-moe": {
        "architecture": "Qwen2MoeForCausalLM",
        "config": DENSE
        | {
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 1e6},
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "norm_topk_prob": False,
        },
        "flags": flags(2, 96, 1000000, "1e-6", *GROUPED, *UNTIED, "--add-qkv-bias")
        + moe_flags(
            8,
            2,
            32,
            "[1]*2",
            "--moe-router-score-function",
            "softmax",
            "--moe-router-pre-softmax",
            "--moe-shared-expert-intermediate-size",
            "64",
            "--moe-shared-expert-gate",
        ),  # fmt: skip
    },
    "qwen3-moe": {
        "architecture": "Qwen3MoeForCausalLM",
        "config": DENSE
        | {
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 1e6},
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        "flags": flags(2, 96, 1000000, "1e-6", *GROUPED, *UNTIED, "--qk-layernorm")
        + moe_flags(8, 2, 32, "[1]*2", "--moe-router-score-function", "softmax"),
    },
    "qwen3-vl-moe": {
        "architecture": "Qwen3VLMoeForConditionalGeneration",
        "config": {
            "text_config": DENSE
            | {
                "vocab_size": 285,  # with the tokens of images
                "head_dim": 16,
                "num_hidden_layers": 6,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {
                    "rope_theta": 5e6,
                    "rope_type": "default",
                    "mrope_section": [4, 2, 2],
                    "mrope_interleaved": True,
                },
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 48,  # twice 32 would make gate_up_proj square
            },
            "vision_config": LEVELS | {"deepstack_visual_indexes": [0, 1, 2]},  # as many as published: the engine's
            "image_token_id": 283,
            "video_token_id": 284,
            "vision_start_token_id": 281,
            "vision_end_token_id": 282,
            "tie_word_embeddings": False,
        },
        "flags": flags(
            6,
            96,
            5000000,
            "1e-6",
            *GROUPED,
            *UNTIED,
            "--qk-layernorm",
            "--position-embedding-type",
            "mrope",
            "--mrope-section",
            *("4", "2", "2"),
            *("--vocab-size", "285"),
        )
        + moe_flags(8, 2, 48, "[1]*6", "--moe-router-score-function", "softmax"),
    },
    "glm4-moe": {
        "architecture": "Glm4MoeForCausalLM",
        "config": DENSE
        | {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        "flags": flags(
            3,
            96,
            1000000,
            "1e-5",
            *GROUPED,
            *UNTIED,
            "--add-qkv-bias",
            "--qk-layernorm",
            "--rotary-percent",
            "0.5",
        )
        + moe_flags(
            8,
            2,
            32,
            "[0]*1+[1]*2",
            *SIGMOID,
            "--moe-router-topk-scaling-factor",
            "2.5",
            "--moe-shared-expert-intermediate-size",
            "32",
        ),  # fmt: skip
        "published": {"num_nextn_predict_layers": 0},
    },
}
