"""Flags of the network in Megatron-LM's spelling (sizes, attention variants, RoPE, MTP), and of its LoRA adapters."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag, layer_pattern
from slimrl.models.adapters import ADAPTER_NAME, EVERY_TARGET


@dataclasses.dataclass
class ModelArguments:
    """Shape of the transformer."""

    num_layers: int = flag(None, "transformer layers (count, required)", at_least=1)
    hidden_size: int = flag(None, "width of the residual stream (required)", at_least=1)
    ffn_hidden_size: int = flag(
        None, "inner width of the feed-forward block (4 x hidden size, with --swiglu 8/3 x in steps of 64)", at_least=1
    )
    num_attention_heads: int = flag(None, "query heads (count, required)", at_least=1)
    group_query_attention: bool = flag(False, "grouped-query attention: several query heads per key/value head")
    num_query_groups: int = flag(
        None, "key/value heads (count); needs --group-query-attention (one per query head)", at_least=1
    )
    kv_channels: int = flag(None, "width of one head (hidden size / heads)", at_least=1)
    vocab_size: int = flag(None, "vocabulary size before padding (count, required)", at_least=1)
    make_vocab_size_divisible_by: int = flag(
        128, "pad the embedding to a multiple of this x tensor parallel size", at_least=1
    )
    padded_vocab_size: int = flag(None, "rows of the embedding after padding (computed from --vocab-size)", at_least=1)
    seq_length: int = flag(4096, "placeholder of Megatron's configuration (tokens); never limits a sample", at_least=1)
    max_position_embeddings: int = flag(
        None,
        "placeholder of Megatron's configuration (tokens; --seq-length); rotary positions have no limit",
        at_least=1,
    )
    untie_embeddings_and_output_weights: bool = flag(False, "separate weights for the output layer")
    swiglu: bool = flag(False, "gated SiLU feed-forward (GELU)")
    squared_relu: bool = flag(
        False, "squared ReLU feed-forward", not_served="every supported family has a gated SiLU; use --swiglu"
    )
    openai_gelu: bool = flag(
        False, "OpenAI's GELU feed-forward", not_served="every supported family has a gated SiLU; use --swiglu"
    )
    quick_geglu: bool = flag(
        False, "gated quick GELU feed-forward", not_served="every supported family has a gated SiLU; use --swiglu"
    )
    glu_linear_offset: float = flag(
        0.0,
        "offset of the ungated half of the feed-forward block",
        not_served="no supported family has it; leave it out",
    )
    activation_func_clamp_value: float | None = flag(
        None, "bound of the activations (none)", not_served="no supported family has it; leave it out"
    )
    activation_func_fp8_input_store: bool = flag(False, "keep the activation's input in fp8 for the backward pass")
    add_bias_linear: bool = flag(True, "no bias in any linear layer", negated=True, off=("--disable-bias-linear",))
    add_qkv_bias: bool = flag(False, "bias on the query, key and value projections only (Qwen2)")
    qk_layernorm: bool = flag(False, "normalise queries and keys per head (Qwen3)")
    normalization: str = flag("LayerNorm", "kind of normalisation", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(
        1e-5, "constant added to the variance in a normalisation", spellings=("--layernorm-epsilon",), above=0
    )
    apply_layernorm_1p: bool = flag(
        False, "norm weights are stored minus 1", spellings=("--layernorm-zero-centered-gamma",)
    )
    apply_residual_connection_post_layernorm: bool = flag(
        False,
        "take the residual after the norm",
        not_served="every supported family takes it before the norm; leave it out",
    )
    attention_dropout: float = flag(
        0.0, "dropout of attention weights (probability; Megatron's own default is 0.1)", at_least=0, below=1
    )
    hidden_dropout: float = flag(
        0.0, "dropout of the residual stream (probability; Megatron's own default is 0.1)", at_least=0, below=1
    )
    init_method_std: float = flag(0.02, "standard deviation of randomly initialized weights", above=0)
    embedding_init_method_std: float | None = flag(
        None, "standard deviation of a randomly initialized embedding (--init-method-std)", above=0
    )
    perform_initialization: bool = flag(
        True,
        "leave new weights uninitialized",
        negated=True,
        off=("--no-initialization",),
        not_served="megatron-core then gives wrong gradient norms under tensor parallelism; leave it out",
    )
    use_cpu_initialization: bool = flag(
        False,
        "initialize weights in host memory",
        not_served="all weights are loaded from a checkpoint; leave it out",
    )
    spec: list[str] | None = flag(
        None,
        "custom layers: module, and function in it; weights must have the family's names",
        nargs="+",
    )
    model_name: str | None = flag(
        None,
        "name of the weight mapping",
        not_served="the mapping follows from model_type in config.json of --hf-checkpoint; leave it out",
    )
    custom_model_provider_path: str | None = flag(
        None,
        "function that builds the model (dotted import path); its weights must have the family's names",
    )
    enable_experimental: bool = flag(
        False, "megatron-core's experimental features", not_served="slimrl uses none of them; leave it out"
    )


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
        served=("yarn", "mrope"),
    )
    mrope_section: list[int] | None = flag(
        None, "mrope: pairs of rotary channels of time, height and width (counts)", nargs="+", at_least=1
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


_MTP = "MTP layers are copied from the original checkpoint and not trained; leave it out"


@dataclasses.dataclass
class MultiTokenArguments:
    """Multi-token prediction."""

    mtp_num_layers: int | None = flag(None, "MTP layers (count; none)", not_served=_MTP)
    mtp_loss_scaling_factor: float = flag(0.2, "weight of the MTP loss", at_least=0, not_served=_MTP)
    enable_mtp_training: bool = flag(False, "train MTP layers", not_served=_MTP)


_MAMBA = "no family with Mamba layers is supported; use a transformer"
_BLOCKS = "no family with different layer shapes is supported; use a model of equal layers"
_LOOP = "it is megatron-core's switch for its own tests; leave it out"


@dataclasses.dataclass
class OtherModelArguments:
    """Models and modes of megatron-core that are unsupported."""

    is_hybrid_model: bool = flag(False, "a model with Mamba layers", not_served=_MAMBA)
    mamba_state_dim: int = flag(128, "Mamba: width of the state", not_served=_MAMBA)
    mamba_head_dim: int = flag(64, "Mamba: width of a head", not_served=_MAMBA)
    mamba_num_groups: int = flag(8, "Mamba: groups (count)", not_served=_MAMBA)
    mamba_num_heads: int | None = flag(None, "Mamba: heads (count)", not_served=_MAMBA)
    use_mamba_mem_eff_path: bool = flag(
        True,
        "Mamba: plain instead of memory-efficient kernel",
        negated=True,
        off=("--disable-mamba-mem-eff-path",),
        not_served=_MAMBA,
    )
    heterogeneous_block_specs: bool = flag(False, "describe layers individually in a file", not_served=_BLOCKS)
    hetereogenous_dist_checkpoint: bool = flag(False, "store each layer under its own key", not_served=_BLOCKS)
    mtp_standalone: bool = flag(False, "MTP layers on a separate pipeline stage", not_served=_MTP)
    init_model_with_meta_device: bool = flag(
        False,
        "create weights on the meta device first",
        not_served="weights are loaded before Megatron-FSDP shards them; leave it out",
    )
    test_mode: bool = flag(False, "megatron-core's test mode", not_served=_LOOP)
    config_logger_dir: str = flag("", "folder for megatron-core's log of configurations", not_served=_LOOP)


@dataclasses.dataclass
class LoraArguments:
    """LoRA adapters (arXiv:2106.09685), trained in place of the weights of the policy."""

    lora_rank: int | None = flag(
        None, "train LoRA adapters of this rank; the weights of --ref-load are their base and stay as they are", above=0
    )
    lora_alpha: float | None = flag(
        None, "scale of the adapters: their part is multiplied by alpha / rank (default: the rank)", above=0
    )
    lora_target_modules: list[str] | None = flag(
        None,
        "projections with an adapter, by their Hugging Face names; those of experts included (default: all). The"
        " critic's too, with --critic-lora-rank",
        choices=EVERY_TARGET,
        nargs="+",
    )
    lora_dropout: float = flag(
        0.0,
        "probability of dropping an input of an adapter in training",
        at_least=0,
        below=1,
        not_served="dropout before adapters is unsupported: the engines sample without it; leave it out",
    )
    lora_load: str | None = flag(None, "PEFT folder with the adapters of a new run (default: fresh ones, by --seed)")
    lora_merge: bool = flag(
        False,
        "merge the adapters into the weights that the engines and --save-hf get; a PEFT folder is saved beside those"
        " (default: the engines load the adapters beside their base, and --save-hf writes PEFT folders)",
    )
    lora_name: str = flag(
        ADAPTER_NAME,
        "name of the adapter in the engines; runs that share external servers have different ones (letters, digits,"
        " - and _)",
    )
