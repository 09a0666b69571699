"""Command lines of models with published sizes, for the tests of the plan."""

from __future__ import annotations

from typing import Any

from slimrl.arguments import Arguments
from slimrl.arguments.derive import derive

# config.json of each model on the Hugging Face Hub, as fields of the flags
QWEN3_4B: dict[str, Any] = dict(
    num_layers=36,
    hidden_size=2560,
    ffn_hidden_size=9728,
    num_attention_heads=32,
    group_query_attention=True,
    num_query_groups=8,
    kv_channels=128,
    vocab_size=151936,
    qk_layernorm=True,
)
QWEN3_30B_A3B: dict[str, Any] = QWEN3_4B | dict(
    num_layers=48,
    hidden_size=2048,
    ffn_hidden_size=6144,
    num_query_groups=4,
    untie_embeddings_and_output_weights=True,
    num_experts=128,
    moe_router_topk=8,
    moe_ffn_hidden_size=768,
)
DEEPSEEK_V3: dict[str, Any] = dict(
    num_layers=61,
    hidden_size=7168,
    ffn_hidden_size=18432,
    num_attention_heads=128,
    vocab_size=129280,
    untie_embeddings_and_output_weights=True,
    qk_layernorm=True,
    multi_latent_attention=True,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_head_dim=128,
    qk_pos_emb_head_dim=64,
    v_head_dim=128,
    num_experts=256,
    moe_layer_freq=[0] * 3 + [1] * 58,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    moe_router_topk=8,
    moe_router_enable_expert_bias=True,
)
RUN: dict[str, Any] = dict(
    swiglu=True,
    normalization="RMSNorm",
    add_bias_linear=False,
    rollout_batch_size=32,
    n_samples_per_prompt=8,
    rollout_max_response_len=8192,
    rollout_max_prompt_len=1024,
    num_rollout=100,
    run_name="x",
)


def flags(*parts: dict[str, Any], **changes: Any) -> Arguments:
    """Checked arguments of a run of this model."""
    values = dict(RUN)
    for part in (*parts, changes):
        values |= part
    args = Arguments(**values)
    derive(args)
    return args
