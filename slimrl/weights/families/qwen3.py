"""Dense Qwen3: normalised queries and keys, no biases."""

from __future__ import annotations

from slimrl.weights.families import dense
from slimrl.weights.families.table import Family

FAMILY = Family(
    model_type="qwen3",
    qk_layernorm=True,
    qkv_bias=False,
    embedding=dense.EMBEDDING,
    layer=(
        dense.ATTENTION_NORM,
        dense.QKV,
        dense.QUERY_NORM,
        dense.KEY_NORM,
        dense.ATTENTION_OUTPUT,
        dense.MLP_NORM,
        dense.GATE_UP,
        dense.DOWN,
    ),
    final_norm=dense.FINAL_NORM,
    head=dense.HEAD,
    head_dim=128,
    fixed_config=(("attention_bias", False),),
)
