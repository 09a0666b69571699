"""Packed attention and the norm against explicit formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

TOKENS, HEADS, GROUPS, CHANNELS = 11, 4, 2, 8


@pytest.fixture(scope="module")
def attention() -> torch.nn.Module:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from slimrl.megatron.model.attention import PackedCoreAttention

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * CHANNELS,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=0.0,
    )
    return PackedCoreAttention(config, 1, AttnMaskType.causal, "self")


def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(q k / sqrt(d)) v of one sequence, [length, heads, d], float64, keys up to the query only."""
    query, key, value = query.double(), key.double(), value.double()
    result = torch.zeros_like(query)
    for position in range(query.shape[0]):
        for head in range(query.shape[1]):
            group = head * key.shape[1] // query.shape[1]
            scores = key[: position + 1, group] @ query[position, head] / math.sqrt(query.shape[2])
            result[position, head] = scores.softmax(0) @ value[: position + 1, group]
    return result


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("lengths", [[11], [4, 1, 6], [4, 3, 4], [1] * 11, [0, 8, 0, 3]])
def test_packed_sequences_do_not_attend_to_each_other(attention: torch.nn.Module, lengths: list[int]):
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    query, key, value = (
        draw(TOKENS, HEADS, CHANNELS),
        draw(TOKENS, GROUPS, CHANNELS),
        1 + draw(TOKENS, GROUPS, CHANNELS),
    )
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    actual = attention(query, key, value, None, packed_seq_params=params)
    pieces = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
    expected = torch.cat([by_hand(*piece) for piece in pieces]).flatten(1)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-6)


def test_sequences_of_one_length_give_the_bits_of_each_alone(attention: torch.nn.Module, monkeypatch):
    from slimrl.megatron.model import attention as module
    from slimrl.megatron.model.micro_batch import packed_sequences

    lengths = [3, 40, 3, 7, 40, 3, 300, 300]
    sequences = packed_sequences(torch.tensor(lengths), 1, torch.device("cpu"), rank=0)
    inputs = [draw(sum(lengths), heads, CHANNELS).requires_grad_() for heads in (HEADS, GROUPS, GROUPS)]
    upstream = draw(sum(lengths), HEADS * CHANNELS)

    def outcome() -> list[Tensor]:
        result = attention(*inputs, None, packed_seq_params=sequences)
        return [result, *torch.autograd.grad(result, inputs, upstream)]

    batched = outcome()
    monkeypatch.setattr(module, "BATCHED_LENGTH", 0)
    assert all(map(torch.equal, batched, outcome()))


def test_host_lengths_are_not_read_from_the_device(attention: torch.nn.Module):
    from slimrl.megatron.model.micro_batch import packed_sequences

    nowhere = torch.device("meta")  # has no values: reading one raises
    sequences = packed_sequences(torch.tensor([4, 1, 6]), 1, nowhere, rank=0)
    query, key = (torch.empty(TOKENS, heads, CHANNELS, device=nowhere) for heads in (HEADS, GROUPS))
    assert attention(query, key, key, None, packed_seq_params=sequences).shape == (TOKENS, HEADS * CHANNELS)


def test_padded_batches_give_the_same_per_sequence_result(attention: torch.nn.Module):
    query, key, value = draw(5, 2, HEADS, CHANNELS), draw(5, 2, GROUPS, CHANNELS), draw(5, 2, GROUPS, CHANNELS)
    actual = attention(query, key, value, None)
    assert actual.shape == (5, 2, HEADS * CHANNELS)
    for row in range(2):
        expected = by_hand(query[:, row], key[:, row], value[:, row]).flatten(1)
        torch.testing.assert_close(actual[:, row].double(), expected, rtol=0, atol=1e-6)


def test_norm_divides_by_rms_and_is_marked_for_sequence_parallelism():
    from megatron.core.transformer import TransformerConfig

    from slimrl.megatron.model.layers import RMSNorm

    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=2, sequence_parallel=True
    )
    norm = RMSNorm(config, 8, eps=1e-3)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(8.0))
    x = draw(3, 8)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * torch.arange(8.0)
    torch.testing.assert_close(norm(x), expected)
    assert norm.weight.sequence_parallel
