"""Operations of a forward pass: against what torch counts in transformers' models, and Qwen3-4B by hand."""

import dataclasses

import pytest

from slimrl.models.model_size import forward_flops
from slimrl.models.model_spec import Experts, LatentAttention, ModelSpec

LENGTH = 24
QWEN3_4B = ModelSpec(
    hidden_size=2560,
    ffn_hidden_size=9728,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    vocab_size=151936,
    padded_vocab_size=151936,
    tied=True,
    gated=True,
    qk_layernorm=True,
    linear_bias=False,
    qkv_bias=False,
    norm_bias=False,
    norms_per_layer=2,
    moe_layers=(False,) * 36,
)
TOY = dataclasses.replace(
    QWEN3_4B,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=16,
    vocab_size=64,
    moe_layers=(False,) * 3,
)
EXPERTS = Experts(number=8, top_k=3, ffn_hidden_size=24)


def counted(model) -> int:
    """Operations of matrix products as torch counts them while they run."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(LENGTH)[None])
    return counter.get_total_flops()


def beyond_the_diagonal(shape: ModelSpec, widths: int) -> int:
    """Operations above the diagonal, which transformers' eager attention computes and the model does not need."""
    return 2 * shape.num_layers * shape.num_attention_heads * widths * (LENGTH**2 - LENGTH * (LENGTH + 1) // 2)


def small(shape: ModelSpec) -> dict:
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "head_dim": shape.kv_channels,
        "num_hidden_layers": shape.num_layers,
        "vocab_size": shape.vocab_size,
        "attn_implementation": "eager",
    }


def test_dense_model_with_heads_wider_than_its_hidden_size():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    assert TOY.num_attention_heads * TOY.kv_channels == 2 * TOY.hidden_size
    model = Qwen3ForCausalLM(Qwen3Config(**small(TOY)))
    rotary = 2 * (TOY.kv_channels // 2) * LENGTH  # its angles are a matrix product there
    expected = counted(model) - beyond_the_diagonal(TOY, 2 * TOY.kv_channels) - rotary
    assert forward_flops(TOY, [LENGTH], LENGTH) == expected


def test_latent_attention():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    latent = LatentAttention(q_lora_rank=12, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6)
    shape = dataclasses.replace(TOY, latent=latent)
    config = DeepseekV3Config(
        **{**small(shape), "head_dim": 4, "num_key_value_heads": shape.num_attention_heads},
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        first_k_dense_replace=shape.num_layers,
    )
    rotary = 2 * (4 // 2) * LENGTH
    expected = counted(DeepseekV3ForCausalLM(config)) - beyond_the_diagonal(shape, 8 + 4 + 6) - rotary
    assert forward_flops(shape, [LENGTH], LENGTH) == expected


def test_experts_count_once_per_routed_token():
    moe = dataclasses.replace(TOY, moe_layers=(False, True, True), experts=EXPERTS)
    router, expert, dense = 32 * 8, 3 * 32 * 24, 3 * 32 * 48
    saved = 2 * (router + 3 * expert - dense)
    assert forward_flops(moe, [LENGTH], 0) - forward_flops(TOY, [LENGTH], 0) == 2 * LENGTH * saved
    shared = dataclasses.replace(EXPERTS, shared_ffn_hidden_size=40, shared_gate=True)
    more = 2 * LENGTH * 2 * (3 * 32 * 40 + 32)
    with_shared = dataclasses.replace(moe, experts=shared)
    assert forward_flops(with_shared, [LENGTH], 0) - forward_flops(moe, [LENGTH], 0) == more


def test_qwen3_4b_by_hand():
    """Its output projection is 4096 x 2560, not 2560 x 2560."""
    layer = 2560 * 4096 + 2 * 2560 * 1024 + 4096 * 2560 + 3 * 2560 * 9728
    assert forward_flops(QWEN3_4B, [1], 0) == 36 * (2 * layer + 2 * 32 * 2 * 128)
    assert forward_flops(QWEN3_4B, [1], 1) - forward_flops(QWEN3_4B, [1], 0) == 2 * 2560 * 151936


@pytest.mark.parametrize("lengths", [[5, 3], [8]])
def test_attention_is_counted_within_each_sequence_only(lengths):
    attention = 2 * TOY.num_attention_heads * 2 * TOY.kv_channels * TOY.num_layers
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    linear = forward_flops(TOY, [1] * 8, 0) - 8 * attention
    assert forward_flops(TOY, lengths, 0) == linear + attention * pairs
