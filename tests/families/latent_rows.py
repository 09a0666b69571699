"""Toy models of families with latent attention: DeepSeek-V3 and models of its architecture."""

from __future__ import annotations

from typing import Any

from tests.families.shapes import SIGMOID, SIZES, UNTIED, config_code, flags, moe_flags

MLA = SIZES | {
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
MLA_FLAGS = (
    "--multi-latent-attention",
    "--kv-lora-rank", "32",
    "--qk-head-dim", "16",
    "--qk-pos-emb-head-dim", "8",
    "--v-head-dim", "16",
    "--kv-channels", "16",
    "--qk-layernorm",
    *UNTIED,
)  # fmt: skip
Q_LORA = ("--q-lora-rank", "48")
DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DEEPSEEK_CONFIG = {
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "ep_size": 1,
    "num_nextn_predict_layers": 0,
}
ROWS: dict[str, dict[str, Any]] = {
    "deepseek-v3": {
        "architecture": "DeepseekV3ForCausalLM",
        "config": MLA
        | {
            "max_position_embeddings": 163840,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "yarn", **DEEPSEEK_YARN},
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
        },
        "flags": flags(3, 96, 10000, "1e-6", *MLA_FLAGS, *Q_LORA, positions=163840)
        + moe_flags(
            16,
            4,
            32,
            "[0]*1+[1]*2",
            *SIGMOID,
            "--moe-router-num-groups",
            "4",
            "--moe-router-group-topk",
            "2",
            "--moe-router-topk-scaling-factor",
            "2.5",
            "--moe-shared-expert-intermediate-size",
            "32",
            "--rotary-scaling-factor",
            "40",
            "--mscale",
            "1.0",
            "--mscale-all-dim",
            "1.0",
        ),  # fmt: skip
        "published": DEEPSEEK_CONFIG | {"rope_scaling": DEEPSEEK_YARN},
    },
    "kimi-k2": {
        "architecture": "DeepseekV3ForCausalLM",
        "config": MLA
        | {
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_theta": 50000.0,
                "rope_type": "yarn",
                **DEEPSEEK_YARN,
                "factor": 32.0,
                "beta_fast": 1.0,
            },
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.827,
        },
        "flags": flags(3, 96, 50000, "1e-6", *MLA_FLAGS, *Q_LORA, positions=131072)
        + moe_flags(
            8,
            2,
            32,
            "[0]*1+[1]*2",
            *SIGMOID,
            "--moe-router-topk-scaling-factor",
            "2.827",
            "--moe-shared-expert-intermediate-size",
            "32",
            "--rotary-scaling-factor",
            "32",
            "--beta-fast",
            "1",
            "--mscale",
            "1.0",
            "--mscale-all-dim",
            "1.0",
        ),  # fmt: skip
        "published": DEEPSEEK_CONFIG
        | {
            "model_type": "kimi_k2",
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
            "rope_scaling": DEEPSEEK_YARN | {"factor": 32.0, "beta_fast": 1.0},
        },
        "code": config_code("configuration_deepseek.py", "DeepseekV3Config", "DeepseekV3Config", "kimi_k2"),
    },
    "moonlight": {
        "architecture": "DeepseekV3ForCausalLM",
        "config": MLA
        | {
            "q_lora_rank": None,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 50000.0},
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.446,
        },
        "flags": flags(3, 96, 50000, "1e-5", *MLA_FLAGS)
        + moe_flags(
            8,
            2,
            32,
            "[0]*1+[1]*2",
            *SIGMOID,
            "--moe-router-topk-scaling-factor",
            "2.446",
            "--moe-shared-expert-intermediate-size",
            "64",
            "--rotary-scaling-factor",
            "1",
            "--mscale",
            "1.0",
            "--mscale-all-dim",
            "1.0",
        ),  # fmt: skip
        "published": DEEPSEEK_CONFIG,
    },
    "glm4-moe-lite": {
        "architecture": "Glm4MoeLiteForCausalLM",
        "config": MLA
        | {
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 1e6},
            "routed_scaling_factor": 1.8,
        },
        "flags": flags(3, 96, 1000000, "1e-5", *MLA_FLAGS, *Q_LORA)
        + moe_flags(
            8,
            2,
            32,
            "[0]*1+[1]*2",
            *SIGMOID,
            "--moe-router-topk-scaling-factor",
            "1.8",
            "--moe-shared-expert-intermediate-size",
            "32",
            "--rope-type",
            "rope",
        ),  # fmt: skip
        "published": {"first_k_dense_replace": 1, "topk_method": "noaux_tc", "num_nextn_predict_layers": 0},
    },
}
