"""DeepSeek-V3 and R1, and Moonlight: latent attention, dense layers first, then experts chosen by biased scores.

The layer after the last one predicts a further token; it is carried over from the original folder, not trained.
"""

from __future__ import annotations

from slimrl.weights.families import dense, latent, moe
from slimrl.weights.families.table import ExtraLayers, Family

FAMILY = Family(
    model_type="deepseek_v3",
    embedding=dense.EMBEDDING,
    layer=(
        dense.ATTENTION_NORM,
        *latent.ATTENTION,
        dense.MLP_NORM,
        dense.GATE_UP,
        dense.DOWN,
        moe.ROUTER,
        moe.EXPERT_BIAS,
        moe.EXPERT_GATE_UP,
        moe.EXPERT_DOWN,
        *moe.shared_experts("shared_experts"),
    ),
    final_norm=dense.FINAL_NORM,
    head=dense.HEAD,
    extra_layers=ExtraLayers("model.layers.{layer}.", after_decoder=True),
    fixed_config=(
        ("attention_bias", False),
        ("moe_layer_freq", 1),
        ("rope_interleave", True),
        ("topk_method", "noaux_tc"),
    ),
)
