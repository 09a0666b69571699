"""Flags that describe the network, in Megatron-LM's spelling; they must agree with config.json of --hf-checkpoint."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class ModelArguments:
    """Shape of the transformer and its kernels."""

    num_layers: int | None = flag(None, "transformer layers (count, required)", at_least=1)
    hidden_size: int | None = flag(None, "width of the residual stream (required)", at_least=1)
    ffn_hidden_size: int | None = flag(
        None, "inner width of the feed-forward block (4 x hidden size, with --swiglu 8/3 x in steps of 64)", at_least=1
    )
    num_attention_heads: int | None = flag(None, "query heads (count, required)", at_least=1)
    group_query_attention: bool = flag(False, "share each key/value head among several query heads")
    num_query_groups: int | None = flag(
        None, "key/value heads (count); needs --group-query-attention (one per query head)", at_least=1
    )
    kv_channels: int | None = flag(None, "width of one head (hidden size / heads)", at_least=1)
    vocab_size: int | None = flag(None, "entries of the vocabulary before padding (count, required)", at_least=1)
    make_vocab_size_divisible_by: int = flag(
        128, "the embedding is padded to a multiple of this x tensor parallel size", at_least=1
    )
    padded_vocab_size: int | None = flag(
        None, "entries of the embedding after padding (computed from the vocabulary)", at_least=1
    )
    seq_length: int = flag(4096, "placeholder of Megatron's configuration (tokens); never limits a sample", at_least=1)
    max_position_embeddings: int | None = flag(
        None,
        "placeholder of Megatron's configuration (tokens; --seq-length); rotary positions have no limit",
        at_least=1,
    )
    untie_embeddings_and_output_weights: bool = flag(False, "give the output layer weights of its own")
    swiglu: bool = flag(False, "gated SiLU feed-forward (without it GELU)")
    add_bias_linear: bool = flag(
        True, "leave out the bias of every linear layer", only_off=True, off=("--disable-bias-linear",)
    )
    add_qkv_bias: bool = flag(False, "bias on the query, key and value projections only (Qwen2)")
    qk_layernorm: bool = flag(False, "normalise queries and keys per head (Qwen3)")
    normalization: str = flag("LayerNorm", "kind of normalisation", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(
        1e-5, "constant added to the variance in a normalisation", spellings=("--layernorm-epsilon",), above=0
    )
    position_embedding_type: str = flag("rope", "kind of position embedding", choices=("rope",))
    use_rotary_position_embeddings: bool = flag(False, "older spelling of --position-embedding-type rope")
    rotary_base: int = flag(10000, "theta of the rotary embedding", at_least=1)
    rotary_percent: float = flag(1.0, "part of each head that is rotated (fraction)", above=0, at_most=1)
    rotary_interleaved: bool = flag(False, "rotate neighbouring channels instead of the two halves")
    use_rope_scaling: bool = flag(False, "Llama 3 scaling of the rotary frequencies")
    rope_scaling_factor: float = flag(8.0, "factor of --use-rope-scaling", at_least=1)
    attention_dropout: float = flag(
        0.0, "dropout of attention weights (probability; Megatron's own default is 0.1)", at_least=0, below=1
    )
    hidden_dropout: float = flag(
        0.0, "dropout of the residual stream (probability; Megatron's own default is 0.1)", at_least=0, below=1
    )
    init_method_std: float = flag(0.02, "standard deviation of freshly drawn weights", above=0)
    attention_softmax_in_fp32: bool = flag(False, "compute the attention softmax in fp32")
    attention_backend: str = flag(
        "auto", "attention kernel of Transformer Engine", choices=("auto", "flash", "fused", "unfused", "local")
    )
    transformer_impl: str | None = flag(
        None,
        "layer implementation (transformer_engine where it is installed, else local)",
        choices=("local", "transformer_engine"),
    )
    masked_softmax_fusion: bool = flag(
        True, "do not fuse scaling, mask and softmax", only_off=True, off=("--no-masked-softmax-fusion",)
    )
    apply_rope_fusion: bool = flag(True, "do not use the fused rotary kernel", only_off=True, off=("--no-rope-fusion",))
    gradient_accumulation_fusion: bool = flag(
        True,
        "do not add weight gradients inside the matrix product kernel",
        only_off=True,
        off=("--no-gradient-accumulation-fusion",),
    )
    bf16: bool = flag(False, "train in bfloat16 with fp32 master weights (without --bf16 and --fp16: fp32)")
    fp16: bool = flag(False, "train in float16 with fp32 master weights and loss scaling")
