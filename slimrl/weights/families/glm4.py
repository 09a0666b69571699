"""GLM-4 (dense): norms after attention and feed-forward too; gate and up projection stored as one tensor."""

from __future__ import annotations

from slimrl.weights.families import dense
from slimrl.weights.families.dense import HF_LAYER, MEGATRON_LAYER
from slimrl.weights.families.table import Family, HfTensor, Layout, Row

POST_ATTENTION_NORM = Row(
    megatron=(MEGATRON_LAYER + "post_self_attn_layernorm.weight",),
    hf=(HfTensor(HF_LAYER + "post_self_attn_layernorm.weight", ("hidden",)),),
)
GATE_UP = Row(
    megatron=dense.GATE_UP.megatron,
    hf=(HfTensor(HF_LAYER + "mlp.gate_up_proj.weight", ("twice_ffn", "hidden")),),
    layout=Layout.PACKED_GATE_UP,
    shard_dim=0,
)
POST_MLP_NORM = Row(
    megatron=(MEGATRON_LAYER + "post_mlp_layernorm.weight",),
    hf=(HfTensor(HF_LAYER + "post_mlp_layernorm.weight", ("hidden",)),),
)

FAMILY = Family(
    model_type="glm4",
    embedding=dense.EMBEDDING,
    layer=(
        dense.ATTENTION_NORM,
        dense.QKV,
        dense.QKV_BIAS,
        dense.ATTENTION_OUTPUT,
        POST_ATTENTION_NORM,
        dense.MLP_NORM,
        GATE_UP,
        dense.DOWN,
        POST_MLP_NORM,
    ),
    final_norm=dense.FINAL_NORM,
    head=dense.HEAD,
)
