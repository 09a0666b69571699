"""MiMo (dense): Qwen2's layers, and layers that predict further tokens, carried over from the original folder."""

from __future__ import annotations

from slimrl.weights.families import dense, qwen2
from slimrl.weights.families.table import ExtraLayers, Family

FAMILY = Family(
    model_type="mimo",
    embedding=dense.EMBEDDING,
    layer=qwen2.FAMILY.layer,
    final_norm=dense.FINAL_NORM,
    head=dense.HEAD,
    extra_layers=ExtraLayers("model.mtp_layers.{layer}.", after_decoder=False),
)
