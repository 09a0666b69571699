"""Dense Llama 2 and 3: no biases, no query or key norms."""

from __future__ import annotations

from slimrl.weights.families import dense
from slimrl.weights.families.table import Family

FAMILY = Family(
    model_type="llama",
    embedding=dense.EMBEDDING,
    layer=(
        dense.ATTENTION_NORM,
        dense.QKV,
        dense.ATTENTION_OUTPUT,
        dense.MLP_NORM,
        dense.GATE_UP,
        dense.DOWN,
    ),
    final_norm=dense.FINAL_NORM,
    head=dense.HEAD,
    fixed_config=(("attention_bias", False), ("mlp_bias", False)),
)
