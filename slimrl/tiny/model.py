"""The model: a Qwen3 of a few hundred thousand parameters, and the Megatron flags which describe it.

Owns the sizes on offer, the Hugging Face configuration made from one, and MODEL_ARGS for the same shape.
"""

from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True)
class TinySize:
    """The shape of a tiny Qwen3; every count divides by a tensor-parallel size of 2."""

    num_layers: int = 2
    hidden_size: int = 64
    ffn_hidden_size: int = 128
    num_attention_heads: int = 4
    num_query_groups: int = 2
    kv_channels: int = 16
    max_position_embeddings: int = 2048
    rotary_base: int = 10000
    norm_epsilon: float = 1e-6
    tied: bool = True

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"--num-attention-heads {self.num_attention_heads} is no multiple of "
                f"--num-query-groups {self.num_query_groups}; each group serves the same number of heads"
            )


SIZES = {
    "tiny": TinySize(),
    "small": TinySize(
        num_layers=4, hidden_size=128, ffn_hidden_size=384, num_attention_heads=8, num_query_groups=4, kv_channels=16
    ),
}


def build_model(size: TinySize, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Qwen3ForCausalLM:
    """A randomly initialised float32 model; the same seed gives the same weights. Leaves torch's random state alone."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        intermediate_size=size.ffn_hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_attention_heads,
        num_key_value_heads=size.num_query_groups,
        head_dim=size.kv_channels,
        max_position_embeddings=size.max_position_embeddings,
        rms_norm_eps=size.norm_epsilon,
        rope_theta=size.rotary_base,
        tie_word_embeddings=size.tied,
        # The usual 0.02 is meant for widths in the thousands; at 64 it doubles the length of the warm start.
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    return model


def model_args_script(size: TinySize, *, vocab_size: int) -> str:
    """The text of a bash file that sets MODEL_ARGS, in the form of ``scripts/models/*.sh``."""
    lines = [
        "--swiglu",
        f"--num-layers {size.num_layers}",
        f"--hidden-size {size.hidden_size}",
        f"--ffn-hidden-size {size.ffn_hidden_size}",
        f"--num-attention-heads {size.num_attention_heads}",
        "--group-query-attention",
        f"--num-query-groups {size.num_query_groups}",
        f"--kv-channels {size.kv_channels}",
        "--qk-layernorm",
        "--use-rotary-position-embeddings",
        f"--rotary-base {size.rotary_base}",
        "--disable-bias-linear",
        "--normalization RMSNorm",
        f"--norm-epsilon {size.norm_epsilon}",
        f"--vocab-size {vocab_size}",
        f"--max-position-embeddings {size.max_position_embeddings}",
    ]
    if not size.tied:
        lines.append("--untie-embeddings-and-output-weights")
    body = "".join(f"   {line}\n" for line in lines)
    header = "# Megatron flags of this model; to be sourced.\n# shellcheck shell=bash disable=SC2034\n"
    return f"{header}MODEL_ARGS=(\n{body})\n"
