"""GLM-4.5 and 4.6: dense layers first, then experts with a bias on their choice and a shared expert.

Query and key norms and attention biases are there or not by config.json. The layer after the last one predicts a
further token; it is carried over from the original folder, not trained.
"""

from __future__ import annotations

from slimrl.weights.families import dense, moe
from slimrl.weights.families.table import ExtraLayers, Family

FAMILY = Family(
    model_type="glm4_moe",
    embedding=dense.EMBEDDING,
    layer=(
        dense.ATTENTION_NORM,
        dense.QKV,
        dense.QKV_BIAS,
        dense.QUERY_NORM,
        dense.KEY_NORM,
        dense.ATTENTION_OUTPUT,
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
)
