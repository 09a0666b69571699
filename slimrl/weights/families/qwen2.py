"""Dense Qwen2 and Qwen2.5: biases on queries, keys and values only."""

from __future__ import annotations

from slimrl.weights.families import dense
from slimrl.weights.families.table import Family

FAMILY = Family(
    model_type="qwen2",
    qk_layernorm=False,
    qkv_bias=True,
    embedding=dense.EMBEDDING,
    layer=(
        dense.ATTENTION_NORM,
        dense.QKV,
        dense.QKV_BIAS,
        dense.ATTENTION_OUTPUT,
        dense.MLP_NORM,
        dense.GATE_UP,
        dense.DOWN,
    ),
    final_norm=dense.FINAL_NORM,
    head=dense.HEAD,
)
