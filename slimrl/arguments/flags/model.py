"""Flags of the network, including multi-token prediction (MTP) layers, in Megatron-LM's spelling.

They must agree with config.json of --hf-checkpoint. megatron-core flags of models that no slimrl family supports are
rejected with the reason.
"""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


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


_MTP = "MTP layers are copied from the original checkpoint and not trained; leave it out"


@dataclasses.dataclass
class MultiTokenArguments:
    """Multi-token prediction."""

    mtp_num_layers: int | None = flag(None, "MTP layers (count; none)", not_served=_MTP)
    mtp_loss_scaling_factor: float = flag(0.2, "weight of the MTP loss", at_least=0, not_served=_MTP)
    enable_mtp_training: bool = flag(False, "train MTP layers", not_served=_MTP)


_MAMBA = "no family with Mamba layers is supported; use a transformer"
_BLOCKS = "no family with different layer shapes is supported; use a model of equal layers"
_MROPE = "no multimodal family is supported; use the text model"
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
    mrope_section: list[int] | None = flag(
        None, "rotary channels of time, height and width", nargs="+", not_served=_MROPE
    )
    mtp_standalone: bool = flag(False, "MTP layers on a separate pipeline stage", not_served=_MTP)
    init_model_with_meta_device: bool = flag(
        False,
        "create weights on the meta device first",
        not_served="weights are loaded before Megatron-FSDP shards them; leave it out",
    )
    test_mode: bool = flag(False, "megatron-core's test mode", not_served=_LOOP)
    config_logger_dir: str = flag("", "folder for megatron-core's log of configurations", not_served=_LOOP)
