"""Toy models of families whose layers all have one gated MLP."""

from __future__ import annotations

from typing import Any

from tests.families.shapes import DENSE, GROUPED, UNTIED, config_code, flags

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# the published proportions of window, patch and merging
TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_chans": 3,
    "out_hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 56,
    "fullatt_block_indexes": [1],
}
LEVELS = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "out_hidden_size": 64,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
ROWS: dict[str, dict[str, Any]] = {
    "llama": {
        "architecture": "LlamaForCausalLM",
        "config": DENSE
        | {
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 500000.0, "factor": 8.0, **LLAMA3_SCALING},
            "tie_word_embeddings": False,
        },
        "flags": flags(
            2,
            96,
            500000,
            "1e-5",
            *GROUPED,
            *UNTIED,
            "--use-rope-scaling",
            "--rope-scaling-factor",
            "8.0",
            positions=131072,
        ),
    },
    "llama-tied": {
        "architecture": "LlamaForCausalLM",
        "config": DENSE
        | {
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 500000.0, "factor": 32.0, **LLAMA3_SCALING},
            "tie_word_embeddings": True,
        },
        "flags": flags(
            2, 96, 500000, "1e-5", *GROUPED, "--use-rope-scaling", "--rope-scaling-factor", "32.0", positions=131072
        ),
    },
    "qwen2": {
        "architecture": "Qwen2ForCausalLM",
        "config": DENSE | {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 1e6}, "tie_word_embeddings": True},
        "flags": flags(2, 96, 1000000, "1e-6", *GROUPED, "--add-qkv-bias"),
    },
    "qwen2.5-vl": {
        "architecture": "Qwen2_5_VLForConditionalGeneration",
        "config": DENSE
        | {
            "vocab_size": 285,  # with the tokens of images
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [2, 3, 3]},
            "tie_word_embeddings": False,
            "vision_config": TOWER,
            "image_token_id": 283,
            "video_token_id": 284,
            "vision_start_token_id": 281,
            "vision_end_token_id": 282,
        },
        "flags": flags(
            2,
            96,
            1000000,
            "1e-6",
            *GROUPED,
            *UNTIED,
            "--add-qkv-bias",
            "--position-embedding-type",
            "mrope",
            "--mrope-section",
            *("2", "3", "3"),
            *("--vocab-size", "285"),
        ),
    },
    "qwen3-vl": {
        "architecture": "Qwen3VLForConditionalGeneration",
        "config": {
            "text_config": DENSE
            | {
                "vocab_size": 285,
                "head_dim": 16,
                "num_hidden_layers": 4,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {
                    "rope_theta": 5e6,
                    "rope_type": "default",
                    "mrope_section": [4, 2, 2],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": LEVELS,
            "image_token_id": 283,
            "video_token_id": 284,
            "vision_start_token_id": 281,
            "vision_end_token_id": 282,
            "tie_word_embeddings": False,
        },
        "flags": flags(
            4,
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
        ),
    },
    "qwen3": {
        "architecture": "Qwen3ForCausalLM",
        "config": DENSE
        | {
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 1e6},
            "tie_word_embeddings": False,
        },
        "flags": flags(2, 96, 1000000, "1e-6", *GROUPED, *UNTIED, "--qk-layernorm"),
    },
    "glm4": {
        "architecture": "Glm4ForCausalLM",
        "config": DENSE
        | {
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "attention_bias": True,
            "pad_token_id": 278,
        },
        "flags": flags(
            2,
            96,
            10000,
            "1e-5",
            *GROUPED,
            *UNTIED,
            "--add-qkv-bias",
            "--rotary-interleaved",
            "--rotary-percent",
            "0.5",
            "--post-self-attn-layernorm",
            "--post-mlp-layernorm",
        ),  # fmt: skip
    },
    "mimo": {
        "architecture": "Qwen2ForCausalLM",
        "config": DENSE
        | {
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 640000.0},
            "tie_word_embeddings": False,
        },
        "flags": flags(2, 96, 640000, "1e-5", *GROUPED, *UNTIED, "--add-qkv-bias"),
        "published": {
            "model_type": "mimo",
            "architectures": ["MiMoForCausalLM"],
            "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
            "attention_bias": True,
            "num_nextn_predict_layers": 1,
        },
        "mtp_layers": 1,
        "code": config_code("configuration_mimo.py", "MiMoConfig", "Qwen2Config", "mimo"),
    },
}
