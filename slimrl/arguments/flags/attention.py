"""Flags of attention variants (MLA, windowed, gated, sparse, linear) and, in Megatron-LM's spelling, of RoPE."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag, layer_pattern

_NO_LINEAR = "no family with linear attention is supported; use a model with softmax attention"
_NO_SPARSE = "no family with sparse attention (DSA) is supported; use a model with dense attention"


@dataclasses.dataclass
class AttentionArguments:
    """Attention variants."""

    multi_latent_attention: bool = flag(False, "keys and values from one latent vector per token (DeepSeek's MLA)")
    q_lora_rank: int | None = flag(None, "MLA: width of the latent vector of queries (no latent vector)", at_least=1)
    kv_lora_rank: int = flag(32, "MLA: width of the latent vector of keys and values", at_least=1)
    qk_head_dim: int = flag(128, "MLA: width of a head's part without rotary positions", at_least=1)
    qk_pos_emb_head_dim: int = flag(64, "MLA: width of a head's part with rotary positions", at_least=1)
    v_head_dim: int = flag(128, "MLA: width of a value head", at_least=1)
    cache_mla_latents: bool = flag(
        False,
        "cache latent vectors when Megatron generates",
        not_served="SGLang generates; leave it out",
    )
    attention_output_gate: bool = flag(False, "scale the output of attention by a learned gate", not_served=_NO_LINEAR)
    use_gated_attention: bool = flag(False, "slime's name for --attention-output-gate", not_served=_NO_LINEAR)
    post_self_attn_layernorm: bool = flag(False, "also normalise the output of attention (GLM-4)")
    post_mlp_layernorm: bool = flag(False, "also normalise the output of the feed-forward block (GLM-4)")
    qk_l2_norm: bool = flag(
        False,
        "scale queries and keys to unit length",
        not_served="no supported family normalises queries and keys this way; use --qk-layernorm if the model has it",
    )
    qk_clip: bool = flag(
        False,
        "scale down query and key weights whose logits grow",
        not_served="it belongs to the Muon optimizer; leave it out",
    )
    qk_clip_alpha: float = flag(
        0.5, "balance of --qk-clip between queries and keys", not_served="it belongs to --qk-clip; leave it out"
    )
    qk_clip_threshold: float = flag(
        100.0, "largest attention logit of --qk-clip", not_served="it belongs to --qk-clip; leave it out"
    )
    log_max_attention_logit: bool = flag(
        False, "log the largest attention logit", not_served="it is not logged; leave it out"
    )
    softmax_scale: float | None = flag(None, "factor on attention logits (1 / sqrt(width of a head))", above=0)
    softmax_type: str = flag(
        "vanilla",
        "kind of attention softmax",
        choices=("vanilla", "off-by-one", "learnable"),
        not_served="no supported family has attention sinks; leave it out",
    )
    window_size: list[int] | None = flag(
        None,
        "sliding window: tokens to the left and to the right",
        nargs="+",
        not_served="every supported family attends to the whole sequence; leave it out",
    )
    window_attn_skip_freq: int | list[int] | None = flag(
        None,
        "layers without the sliding window: every N-th, or one 0 or 1 per layer",
        parse=layer_pattern,
        not_served="it belongs to --window-size; leave it out",
    )
    no_rope_freq: int | list[int] | None = flag(
        None,
        "layers without rotary positions: every N-th, or one 0 or 1 per layer",
        parse=layer_pattern,
        not_served="every supported family has rotary positions in each layer; leave it out",
    )
    experimental_attention_variant: str | None = flag(
        None, "experimental kind of attention", choices=("gated_delta_net", "dsa"), not_served=_NO_LINEAR
    )
    dsa_indexer_n_heads: int | None = flag(None, "DSA: heads of the indexer (count)", not_served=_NO_SPARSE)
    dsa_indexer_head_dim: int | None = flag(None, "DSA: width of an indexer head", not_served=_NO_SPARSE)
    dsa_indexer_topk: int | None = flag(None, "DSA: attended tokens (count)", not_served=_NO_SPARSE)
    dsa_indexer_loss_coeff: float | None = flag(None, "DSA: weight of the indexer's loss", not_served=_NO_SPARSE)
    dsa_indexer_use_sparse_loss: bool = flag(
        False, "DSA: indexer loss over selected tokens only", not_served=_NO_SPARSE
    )
    freeze_indexer: bool = flag(False, "DSA: do not train the indexer", not_served=_NO_SPARSE)
    allgather_cp: bool = flag(False, "DSA: each context parallel GPU takes one contiguous chunk", not_served=_NO_SPARSE)
    linear_attention_freq: int | list[int] | None = flag(
        None,
        "layers of linear attention: every N-th, or one 0 or 1 per layer",
        parse=layer_pattern,
        not_served=_NO_LINEAR,
    )
    linear_conv_kernel_dim: int = flag(4, "linear attention: width of the convolution", not_served=_NO_LINEAR)
    linear_key_head_dim: int = flag(128, "linear attention: width of a key head", not_served=_NO_LINEAR)
    linear_value_head_dim: int = flag(128, "linear attention: width of a value head", not_served=_NO_LINEAR)
    linear_num_key_heads: int = flag(16, "linear attention: key heads (count)", not_served=_NO_LINEAR)
    linear_num_value_heads: int = flag(32, "linear attention: value heads (count)", not_served=_NO_LINEAR)
    qwen_gdn_backend: str = flag(
        "fla", "kernels of Qwen's linear attention", choices=("fla", "flashqla"), not_served=_NO_LINEAR
    )


@dataclasses.dataclass
class PositionArguments:
    """Rotary positions and their scaling to long contexts."""

    position_embedding_type: str = flag(
        "rope",
        "kind of position embedding",
        choices=("rope", "yarn", "none", "learned_absolute", "mrope", "relative"),
        not_served="every supported family has rotary positions; leave it out",
        served=("yarn",),
    )
    add_position_embedding: bool = flag(
        True,
        "no learned positions (older flag); rotary positions stay",
        negated=True,
        off=("--no-position-embedding",),
    )
    use_rotary_position_embeddings: bool = flag(False, "older spelling of --position-embedding-type rope")
    rotary_base: int = flag(10000, "theta of the rotary embedding", at_least=1)
    rotary_percent: float = flag(1.0, "rotated part of each head (fraction)", above=0, at_most=1)
    rotary_interleaved: bool = flag(False, "rotate neighbouring channels instead of the two halves")
    rotary_seq_len_interpolation_factor: int | None = flag(
        None,
        "divisor of positions (linear interpolation; none)",
        at_least=1,
        not_served="no supported family interpolates positions this way; leave it out",
    )
    use_rope_scaling: bool = flag(False, "Llama 3 scaling of the rotary frequencies")
    rope_scaling_factor: float = flag(8.0, "factor of --use-rope-scaling", at_least=1)
    rope_type: str | None = flag(
        None, "MLA: plain or YaRN rotary positions (yarn with --multi-latent-attention)", choices=("rope", "yarn")
    )
    rotary_scaling_factor: float = flag(1.0, "YaRN: context length relative to pre-training", at_least=1)
    original_max_position_embeddings: int = flag(4096, "YaRN: context length of pre-training (tokens)", at_least=1)
    beta_fast: float = flag(32.0, "YaRN: channels with more rotations per context than this are unchanged", above=0)
    beta_slow: float = flag(
        1.0, "YaRN: channels with fewer rotations per context than this are fully interpolated", above=0
    )
    mscale: float = flag(1.0, "YaRN: factor of the attention temperature")
    mscale_all_dim: float = flag(0.0, "YaRN: the same over all channels (0: none)")
