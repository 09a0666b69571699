"""DeepSeek-V3 and R1, and Moonlight: latent attention, dense layers first, then experts chosen by biased scores.

The layer after the last one predicts a further token; it is carried over from the original folder, not trained.

Kimi-K2: DeepSeek-V3's architecture under a model_type of its own.
"""

from __future__ import annotations

import dataclasses

from slimrl.models.families import param_mapping
from slimrl.models.families.param_mapping import ExtraLayers, Family

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
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
    extra_layers=ExtraLayers("model.layers.{layer}.", after_decoder=True),
    fixed_config=(
        ("attention_bias", False),
        ("moe_layer_freq", 1),
        ("rope_interleave", True),
        ("topk_method", "noaux_tc"),
    ),
)


KIMI_K2: Family = dataclasses.replace(DEEPSEEK_V3, model_type="kimi_k2")
