"""Qwen2 and Qwen2.5, dense and with experts: biases on queries, keys and values only; a gated shared expert."""

from __future__ import annotations

from slimrl.weights.families import dense, moe
from slimrl.weights.families.table import Family

ATTENTION = (
    dense.ATTENTION_NORM,
    dense.QKV,
    dense.QKV_BIAS,
    dense.ATTENTION_OUTPUT,
    dense.MLP_NORM,
)

FAMILY = Family(
    model_type="qwen2",
    embedding=dense.EMBEDDING,
    layer=(*ATTENTION, dense.GATE_UP, dense.DOWN),
    final_norm=dense.FINAL_NORM,
    head=dense.HEAD,
)
MOE_FAMILY = Family(
    model_type="qwen2_moe",
    embedding=dense.EMBEDDING,
    layer=(
        *ATTENTION,
        dense.GATE_UP,
        dense.DOWN,
        moe.ROUTER,
        moe.EXPERT_GATE_UP,
        moe.EXPERT_DOWN,
        *moe.shared_experts("shared_expert"),
        moe.SHARED_EXPERT_GATE,
    ),
    final_norm=dense.FINAL_NORM,
    head=dense.HEAD,
)
