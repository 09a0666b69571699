"""The rows of multi-head latent attention: queries and keys-values pass through narrow, normalised vectors.

A query latent is there or not by config.json. The projections down to the latents are whole on every tensor-parallel
rank; those up from them are divided by heads. Rotary channels stay in the stored order (pairs side by side), which
is the one that megatron-core's latent attention expects too. Engines keep both projections down as one matrix, which
they only write when they are given both at once.
"""

from __future__ import annotations

from slimrl.weights.families.dense import HF_LAYER, MEGATRON_LAYER
from slimrl.weights.families.table import HfTensor, Row

_MEGATRON = MEGATRON_LAYER + "self_attention."
_HF = HF_LAYER + "self_attn."

ATTENTION: tuple[Row, ...] = (
    Row(
        megatron=(_MEGATRON + "linear_q_proj.weight",),
        hf=(HfTensor(_HF + "q_proj.weight", ("latent_queries", "hidden")),),
        shard_dim=0,
        when="no_query_latent",
    ),
    Row(
        megatron=(_MEGATRON + "linear_q_down_proj.weight",),
        hf=(HfTensor(_HF + "q_a_proj.weight", ("q_latent", "hidden")),),
        when="query_latent",
        with_next=True,
    ),
    Row(
        megatron=(_MEGATRON + "linear_kv_down_proj.weight",),
        hf=(HfTensor(_HF + "kv_a_proj_with_mqa.weight", ("kv_latent_and_rope", "hidden")),),
    ),
    Row(
        # the second spelling is that of specs which fuse the norm into the following linear layer
        megatron=(_MEGATRON + "q_layernorm.weight", _MEGATRON + "linear_q_up_proj.layer_norm_weight"),
        hf=(HfTensor(_HF + "q_a_layernorm.weight", ("q_latent",)),),
        when="query_latent",
    ),
    Row(
        megatron=(_MEGATRON + "linear_q_up_proj.weight",),
        hf=(HfTensor(_HF + "q_b_proj.weight", ("latent_queries", "q_latent")),),
        shard_dim=0,
        when="query_latent",
    ),
    Row(
        megatron=(_MEGATRON + "kv_layernorm.weight", _MEGATRON + "linear_kv_up_proj.layer_norm_weight"),
        hf=(HfTensor(_HF + "kv_a_layernorm.weight", ("kv_latent",)),),
    ),
    Row(
        megatron=(_MEGATRON + "linear_kv_up_proj.weight",),
        hf=(HfTensor(_HF + "kv_b_proj.weight", ("latent_keys_values", "kv_latent")),),
        shard_dim=0,
    ),
    Row(
        megatron=(_MEGATRON + "linear_proj.weight",),
        hf=(HfTensor(_HF + "o_proj.weight", ("hidden", "latent_values")),),
        shard_dim=1,
    ),
)
