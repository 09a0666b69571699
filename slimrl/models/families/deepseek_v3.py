"""Tensors and config.json of DeepSeek-V3, R1 and Moonlight (`deepseek_v3`) and of Kimi-K2 (`kimi_k2`).

Latent attention; the first layers are dense, the others have experts chosen by scores with a bias. Kimi-K2 has the same
architecture under a model_type of its own. The MTP layer after the last one is not trained: its tensors are copied from
the original folder.
"""

from __future__ import annotations

import dataclasses

from slimrl.models.families import config_mapping, param_mapping
from slimrl.models.families.param_mapping import ModelMapping, MTPLayers

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
)


KIMI_K2: ModelMapping = dataclasses.replace(DEEPSEEK_V3, model_type="kimi_k2")
