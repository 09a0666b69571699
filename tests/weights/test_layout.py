"""The layout arithmetic against hand-written small tensors."""

import dataclasses

import pytest
import torch

from slimrl.models.families import param_mapping
from slimrl.models.model_spec import ModelSpec
from slimrl.weights.reshard import check_tensor_parallel, from_shards, hf_shapes, megatron_shape, to_shard

# 4 query heads in 2 groups, heads of one channel: row numbers are easy to follow
SHAPE = ModelSpec(
    moe_layers=(False,),
    hidden_size=2,
    ffn_hidden_size=4,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=1,
    vocab_size=5,
    padded_vocab_size=8,
    tied=True,
    qk_layernorm=True,
    qkv_bias=True,
)


def rows(*first_columns: int) -> torch.Tensor:
    """One row [n, n + 0.5] per number."""
    return torch.tensor([[float(n), n + 0.5] for n in first_columns])


def test_fused_attention_weight_has_queries_key_and_value_per_group():
    parts = [rows(10, 11, 12, 13), rows(20, 21), rows(30, 31)]
    merged = to_shard(param_mapping.QKV, parts, SHAPE, rank=0, size=1)
    assert torch.equal(merged, rows(10, 11, 20, 30, 12, 13, 21, 31))


def test_tensor_parallel_rank_has_whole_groups():
    parts = [rows(10, 11, 12, 13), rows(20, 21), rows(30, 31)]
    shards = [to_shard(param_mapping.QKV, parts, SHAPE, rank=rank, size=2) for rank in (0, 1)]
    assert torch.equal(shards[0], rows(10, 11, 20, 30))
    assert torch.equal(shards[1], rows(12, 13, 21, 31))


def test_attention_biases_are_fused_like_their_weights():
    parts = [torch.tensor([10.0, 11, 12, 13]), torch.tensor([20.0, 21]), torch.tensor([30.0, 31])]
    merged = to_shard(param_mapping.QKV_BIAS, parts, SHAPE, rank=0, size=1)
    assert merged.tolist() == [10, 11, 20, 30, 12, 13, 21, 31]


def test_gated_mlp_has_gate_then_up_within_each_shard():
    gate, up = rows(1, 2, 3, 4), rows(5, 6, 7, 8)
    assert torch.equal(to_shard(param_mapping.GATE_UP, [gate, up], SHAPE, rank=0, size=1), rows(1, 2, 3, 4, 5, 6, 7, 8))
    assert torch.equal(to_shard(param_mapping.GATE_UP, [gate, up], SHAPE, rank=0, size=2), rows(1, 2, 5, 6))
    assert torch.equal(to_shard(param_mapping.GATE_UP, [gate, up], SHAPE, rank=1, size=2), rows(3, 4, 7, 8))


def test_output_projection_is_sharded_by_columns():
    full = torch.arange(8.0).view(2, 4)
    assert to_shard(param_mapping.ATTENTION_OUTPUT, [full], SHAPE, rank=1, size=2).tolist() == [[2, 3], [6, 7]]


def test_vocabulary_is_padded_with_zero_rows_on_any_rank():
    full = rows(1, 2, 3, 4, 5)
    zeros = torch.zeros(3, 2)
    assert torch.equal(to_shard(param_mapping.EMBEDDING, [full], SHAPE, rank=0, size=1), torch.cat([full, zeros]))
    assert torch.equal(
        to_shard(param_mapping.EMBEDDING, [full], SHAPE, rank=2, size=4), torch.cat([rows(5), zeros[:1]])
    )
    assert torch.equal(to_shard(param_mapping.EMBEDDING, [full], SHAPE, rank=3, size=4), zeros[:2])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "row",
    [
        param_mapping.EMBEDDING,
        param_mapping.QKV,
        param_mapping.QKV_BIAS,
        param_mapping.KEY_NORM,
        param_mapping.ATTENTION_OUTPUT,
        param_mapping.GATE_UP,
        param_mapping.DOWN,
    ],
    ids=lambda row: row.megatron[0],
)
def test_joining_the_shards_restores_the_parts_bit_for_bit(row, size):
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(*shape, generator=generator) for shape in hf_shapes(row, SHAPE)]
    shards = [to_shard(row, parts, SHAPE, rank=rank, size=size) for rank in range(size)]
    for part, again in zip(parts, from_shards(row, shards, SHAPE), strict=True):
        assert torch.equal(part, again)


def test_shapes_of_full_megatron_tensors():
    assert megatron_shape(param_mapping.EMBEDDING, SHAPE) == (8, 2)
    assert megatron_shape(param_mapping.QKV, SHAPE) == (8, 2)
    assert megatron_shape(param_mapping.QKV_BIAS, SHAPE) == (8,)
    assert megatron_shape(param_mapping.ATTENTION_OUTPUT, SHAPE) == (2, 4)


def test_indivisible_tensor_parallel_size_is_rejected_with_both_numbers():
    with pytest.raises(ValueError, match=r"--tensor-model-parallel-size 4 does not divide --num-query-groups \(2\)"):
        check_tensor_parallel(SHAPE, 4)
    check_tensor_parallel(dataclasses.replace(SHAPE, num_query_groups=4), 4)
