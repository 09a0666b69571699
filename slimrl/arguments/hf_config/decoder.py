"""Rows and tables of the dense families, and what every family shares."""

from __future__ import annotations

from slimrl.arguments.hf_config import rope
from slimrl.arguments.hf_config.row import (
    Config,
    FamilyTable,
    Row,
    Switch,
    Unserved,
    always,
    computed,
    first,
    not_there,
    switched,
    value,
    wrong,
)


def head_width(default: int | None = None) -> Row:
    """The width of a head: `default`, or the residual stream's share, where the file has none."""

    def read(config: Config) -> int | None:
        hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
        return first(config, "head_dim", default=default or (hidden // heads if hidden and heads else None))

    return computed("kv_channels", "head_dim", read)


def qkv_bias(default: bool) -> Switch:
    """Bias on queries, keys and values, as attention_bias says."""

    def is_on(config: Config) -> bool:
        return bool(first(config, "attention_bias", default=default))

    return Switch(
        "add_qkv_bias",
        "--add-qkv-bias",
        is_on,
        lambda config: f"model_type {config['model_type']!r}, attention_bias {str(is_on(config)).lower()}",
    )


# A family's table is these rows, with its own in place of those of the same flag.
COMMON: tuple[Row, ...] = (
    value("num_layers", "num_hidden_layers"),
    value("hidden_size", "hidden_size"),
    value("ffn_hidden_size", "intermediate_size"),
    value("num_attention_heads", "num_attention_heads"),
    value("num_query_groups", "num_key_value_heads", "num_attention_heads"),
    head_width(),
    value("vocab_size", "vocab_size"),
    value("norm_epsilon", "rms_norm_eps"),
    rope.base(),
    rope.percent(1.0),
    rope.llama3_factor(),
    not_there("num_experts", "a model without experts"),
    Switch(
        "swiglu",
        "--swiglu",
        lambda config: first(config, "hidden_act", default="silu") == "silu",
        lambda config: f"hidden_act {first(config, 'hidden_act', default='silu')!r}",
    ),
    switched(
        "untie_embeddings_and_output_weights",
        "--untie-embeddings-and-output-weights",
        "tie_word_embeddings",
        default=False,
        reverse=True,
    ),
    always("qk_layernorm", "--qk-layernorm", False),
    qkv_bias(False),
    Switch("add_bias_linear", "--disable-bias-linear", lambda _: True, lambda _: "no bias in its linear layers"),
    always("rotary_interleaved", "--rotary-interleaved", False),
    rope.llama3_scaling(),
    always("post_self_attn_layernorm", "--post-self-attn-layernorm", False),
    always("post_mlp_layernorm", "--post-mlp-layernorm", False),
    always("multi_latent_attention", "--multi-latent-attention", False),
)
PLAIN_ATTENTION = (
    rope.only("default", "llama3"),
    wrong("use_sliding_window", False),
)
NO_BIASES = (wrong("mlp_bias", False), wrong("attention_bias", False))


def table(model_type: str, *rows: Row, unserved: tuple[Unserved, ...] = PLAIN_ATTENTION) -> FamilyTable:
    """COMMON with the family's own rows."""
    return FamilyTable(model_type, {row.field: row for row in (*COMMON, *rows)}, unserved)


LLAMA = table("llama", unserved=(*PLAIN_ATTENTION, *NO_BIASES))
QWEN2 = table("qwen2", always("add_qkv_bias", "--add-qkv-bias", True))
QWEN3 = table(
    "qwen3",
    always("qk_layernorm", "--qk-layernorm", True),
    head_width(128),
    unserved=(*PLAIN_ATTENTION, *NO_BIASES),
)
GLM4 = table(
    "glm4",
    head_width(128),
    rope.percent(0.5),
    qkv_bias(True),
    always("rotary_interleaved", "--rotary-interleaved", True),
    always("post_self_attn_layernorm", "--post-self-attn-layernorm", True),
    always("post_mlp_layernorm", "--post-mlp-layernorm", True),
)
MIMO = table("mimo", always("add_qkv_bias", "--add-qkv-bias", True))
