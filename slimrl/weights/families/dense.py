"""The rows that dense decoder families share: embedding, attention, gated MLP, RMS norms, head."""

from __future__ import annotations

from slimrl.weights.families.table import HfTensor, Layers, Layout, Row

HF_LAYER = "model.layers.{layer}."
MEGATRON_LAYER = "decoder.layers.{layer}."

EMBEDDING = Row(
    megatron=("embedding.word_embeddings.weight",),
    hf=(HfTensor("model.embed_tokens.weight", ("vocab", "hidden")),),
    shard_dim=0,
)
ATTENTION_NORM = Row(
    # the second spelling is that of specs which fuse the norm into the following linear layer
    megatron=(
        MEGATRON_LAYER + "input_layernorm.weight",
        MEGATRON_LAYER + "self_attention.linear_qkv.layer_norm_weight",
    ),
    hf=(HfTensor(HF_LAYER + "input_layernorm.weight", ("hidden",)),),
)
QKV = Row(
    megatron=(MEGATRON_LAYER + "self_attention.linear_qkv.weight",),
    hf=(
        HfTensor(HF_LAYER + "self_attn.q_proj.weight", ("queries", "hidden")),
        HfTensor(HF_LAYER + "self_attn.k_proj.weight", ("keys", "hidden")),
        HfTensor(HF_LAYER + "self_attn.v_proj.weight", ("keys", "hidden")),
    ),
    layout=Layout.QKV,
    shard_dim=0,
)
QKV_BIAS = Row(
    megatron=(MEGATRON_LAYER + "self_attention.linear_qkv.bias",),
    hf=(
        HfTensor(HF_LAYER + "self_attn.q_proj.bias", ("queries",)),
        HfTensor(HF_LAYER + "self_attn.k_proj.bias", ("keys",)),
        HfTensor(HF_LAYER + "self_attn.v_proj.bias", ("keys",)),
    ),
    layout=Layout.QKV,
    shard_dim=0,
    when="qkv_bias",
)
QUERY_NORM = Row(
    megatron=(MEGATRON_LAYER + "self_attention.q_layernorm.weight",),
    hf=(HfTensor(HF_LAYER + "self_attn.q_norm.weight", ("head",)),),
    when="qk_layernorm",
)
KEY_NORM = Row(
    megatron=(MEGATRON_LAYER + "self_attention.k_layernorm.weight",),
    hf=(HfTensor(HF_LAYER + "self_attn.k_norm.weight", ("head",)),),
    when="qk_layernorm",
)
ATTENTION_OUTPUT = Row(
    megatron=(MEGATRON_LAYER + "self_attention.linear_proj.weight",),
    hf=(HfTensor(HF_LAYER + "self_attn.o_proj.weight", ("hidden", "queries")),),
    shard_dim=1,
)
MLP_NORM = Row(
    megatron=(
        MEGATRON_LAYER + "pre_mlp_layernorm.weight",
        MEGATRON_LAYER + "mlp.linear_fc1.layer_norm_weight",
    ),
    hf=(HfTensor(HF_LAYER + "post_attention_layernorm.weight", ("hidden",)),),
)
GATE_UP = Row(
    megatron=(MEGATRON_LAYER + "mlp.linear_fc1.weight",),
    hf=(
        HfTensor(HF_LAYER + "mlp.gate_proj.weight", ("ffn", "hidden")),
        HfTensor(HF_LAYER + "mlp.up_proj.weight", ("ffn", "hidden")),
    ),
    layout=Layout.GATE_UP,
    shard_dim=0,
    layers=Layers.DENSE,
)
DOWN = Row(
    megatron=(MEGATRON_LAYER + "mlp.linear_fc2.weight",),
    hf=(HfTensor(HF_LAYER + "mlp.down_proj.weight", ("hidden", "ffn")),),
    shard_dim=1,
    layers=Layers.DENSE,
)
FINAL_NORM = Row(
    megatron=("decoder.final_layernorm.weight",),
    hf=(HfTensor("model.norm.weight", ("hidden",)),),
)
HEAD = Row(
    megatron=("output_layer.weight",),
    hf=(HfTensor("lm_head.weight", ("vocab", "hidden")),),
    shard_dim=0,
)
