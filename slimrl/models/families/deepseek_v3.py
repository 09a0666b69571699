"""Tensors and config.json of DeepSeek-V3, R1 and Moonlight (`deepseek_v3`) and of Kimi-K2 (`kimi_k2`).

Latent attention; the first layers are dense, the others have experts selected by biased scores. Kimi-K2 has the same
architecture under another model_type. The MTP layer after the last one is not trained: its tensors are copied from the
original folder.
"""

from __future__ import annotations

import dataclasses

from slimrl.models.families import config_mapping, param_mapping
from slimrl.models.families.config_mapping import TOY_LATENT, TOY_ROUTED, TOY_SIGMOID, ToyConfig, rope, yarn
from slimrl.models.families.param_mapping import ModelMapping, MTPLayers

DEEPSEEK_TOY = ToyConfig(
    "DeepseekV3ForCausalLM",
    TOY_LATENT
    | TOY_ROUTED
    | {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
    | {"first_k_dense_replace": 1, "rms_norm_eps": 1e-6, "routed_scaling_factor": 2.5}
    | yarn(10000.0, factor=40.0, beta_fast=32.0),
    published=TOY_SIGMOID,
)
MOONLIGHT_TOY = ToyConfig(
    "DeepseekV3ForCausalLM",
    TOY_LATENT
    | TOY_ROUTED
    | {"q_lora_rank": None, "first_k_dense_replace": 1, "n_shared_experts": 2, "rms_norm_eps": 1e-5}
    | {"routed_scaling_factor": 2.446}
    | rope(50000.0),
    published=TOY_SIGMOID,
)
KIMI_TOY = ToyConfig(
    "DeepseekV3ForCausalLM",
    TOY_LATENT
    | TOY_ROUTED
    | {"first_k_dense_replace": 1, "n_shared_experts": 1, "rms_norm_eps": 1e-6, "routed_scaling_factor": 2.827}
    | yarn(50000.0, factor=32.0, beta_fast=1.0),
    # Published configs have model_type kimi_k2 and include code for it; that class derives from DeepSeek-V3's.
    published=TOY_SIGMOID,
)

DEEPSEEK_V3 = ModelMapping(
    model_type="deepseek_v3",
    config=config_mapping.latent_table(dense_layers=3),
    embedding=param_mapping.EMBEDDING,
    layer=(
        param_mapping.ATTENTION_NORM,
        *param_mapping.LATENT_ATTENTION,
        param_mapping.MLP_NORM,
        param_mapping.GATE_UP,
        param_mapping.DOWN,
        param_mapping.ROUTER,
        param_mapping.EXPERT_BIAS,
        param_mapping.EXPERT_GATE_UP,
        param_mapping.EXPERT_DOWN,
        *param_mapping.shared_experts("shared_experts"),
    ),
    final_norm=param_mapping.FINAL_NORM,
    head=param_mapping.HEAD,
    extra_layers=MTPLayers("model.layers.{layer}.", after_decoder=True),
    fixed_config=(
        ("attention_bias", False),
        ("moe_layer_freq", 1),
        ("rope_interleave", True),
        ("topk_method", "noaux_tc"),
    ),
    toys={"deepseek_v3": DEEPSEEK_TOY, "moonlight": MOONLIGHT_TOY},
)


KIMI_K2: ModelMapping = dataclasses.replace(DEEPSEEK_V3, model_type="kimi_k2", toys={"kimi_k2": KIMI_TOY})
