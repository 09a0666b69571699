"""Shared by the rows of toy models: sizes for transformers' config classes, and the same sizes in Megatron's flags.

Values with meaning (rope, routing, scaling) are those of the published checkpoints; only sizes are small.
"""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 281  # the vocabulary of slimrl's tiny tokenizer; odd, so that padding matters

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,  # at this width the usual 0.02 makes all tokens about equally likely
    "eos_token_id": 280,
    "bos_token_id": None,
}
DENSE = SIZES | {"num_hidden_layers": 2, "intermediate_size": 96, "num_key_value_heads": 2}
# Megatron's flags for SIZES and for what all of these families share
DECODER = (
    "--swiglu",
    "--disable-bias-linear",
    "--normalization", "RMSNorm",
    "--position-embedding-type", "rope",
    "--hidden-size", "64",
    "--num-attention-heads", "4",
    "--vocab-size", str(VOCAB_SIZE),
)  # fmt: skip
GROUPED = ("--group-query-attention", "--num-query-groups", "2", "--kv-channels", "16")
UNTIED = ("--untie-embeddings-and-output-weights",)


def flags(layers: int, ffn: int, base: int, epsilon: str, *more: str, positions: int = 2048) -> tuple[str, ...]:
    """DECODER with the values in which every family differs."""
    return (
        *DECODER,
        "--num-layers", str(layers),
        "--ffn-hidden-size", str(ffn),
        "--rotary-base", str(base),
        "--norm-epsilon", epsilon,
        "--max-position-embeddings", str(positions),
        *more,
    )  # fmt: skip


def moe_flags(experts: int, topk: int, ffn: int, layer_freq: str, *more: str) -> tuple[str, ...]:
    """The flags of routed experts; no balancing loss, which reinforcement learning does without."""
    return (
        "--num-experts", str(experts),
        "--moe-router-topk", str(topk),
        "--moe-ffn-hidden-size", str(ffn),
        "--moe-layer-freq", layer_freq,
        "--moe-aux-loss-coeff", "0",
        "--moe-token-dispatcher-type", "alltoall",
        "--moe-router-dtype", "fp32",
        *more,
    )  # fmt: skip


# DeepSeek-V3's routing: sigmoid scores, a bias that only affects the choice, scaled sums
SIGMOID = (
    "--moe-router-score-function", "sigmoid",
    "--moe-router-pre-softmax",
    "--moe-router-enable-expert-bias",
    "--moe-router-bias-update-rate", "0",
    "--moe-router-load-balancing-type", "seq_aux_loss",
)  # fmt: skip


def config_code(file: str, name: str, base: str, model_type: str) -> tuple[str, str]:
    """A config class outside transformers, as such folders bring it along: `base` under another model_type."""
    return file, f'import transformers\n\n\nclass {name}(transformers.{base}):\n    model_type = "{model_type}"\n'
