"""Qwen3, dense and with experts: normalised queries and keys, no biases."""

from __future__ import annotations

from slimrl.weights.families import dense, moe
from slimrl.weights.families.table import Family

ATTENTION = (
    dense.ATTENTION_NORM,
    dense.QKV,
    dense.QUERY_NORM,
    dense.KEY_NORM,
    dense.ATTENTION_OUTPUT,
    dense.MLP_NORM,
)

FAMILY = Family(
    model_type="qwen3",
    embedding=dense.EMBEDDING,
    layer=(*ATTENTION, dense.GATE_UP, dense.DOWN),
    final_norm=dense.FINAL_NORM,
    head=dense.HEAD,
    fixed_config=(("attention_bias", False),),
)
MOE_FAMILY = Family(
    model_type="qwen3_moe",
    embedding=dense.EMBEDDING,
    layer=(*ATTENTION, dense.GATE_UP, dense.DOWN, moe.ROUTER, moe.EXPERT_GATE_UP, moe.EXPERT_DOWN),
    final_norm=dense.FINAL_NORM,
    head=dense.HEAD,
    fixed_config=(("attention_bias", False),),
)
