"""The tensors that an engine makes of a table's rows, and the shards on each of its ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from slimrl.models.families import family_for
from slimrl.models.model_spec import Experts, LatentAttention, ModelSpec
from slimrl.weights.update.verify import EngineLayout, engine_shard, engine_tensor

SHAPE = ModelSpec(
    hidden_size=3,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=2,
    vocab_size=64,
    padded_vocab_size=64,
    tied=False,
    qk_layernorm=True,
    qkv_bias=False,
    moe_layers=(True,),
    experts=Experts(number=5, top_k=2, ffn_hidden_size=40, expert_bias=True),
    latent=LatentAttention(q_lora_rank=6, kv_lora_rank=4, qk_head_dim=2, qk_pos_emb_head_dim=2, v_head_dim=2),
)
DEEPSEEK = family_for({"model_type": "deepseek_v3"})


def row_of(name: str, shape: ModelSpec = SHAPE, family=DEEPSEEK):
    return next(row for row in family.rows(shape) if row.hf[0].name == name)


@pytest.mark.parametrize(
    ("name", "engine", "rows"),
    [
        ("experts.3.gate_proj", "experts.w13_weight", 5),
        ("experts.0.down_proj", "experts.w2_weight", 5),
        ("gate", "gate.weight", 1),
    ],
)
def test_experts_of_a_layer_are_stacked_into_two_tensors(name, engine, rows):
    target = engine_tensor(row_of(f"model.layers.0.mlp.{name}.weight"), SHAPE, DEEPSEEK)
    assert (target.name, target.rows) == (f"model.layers.0.mlp.{engine}", rows)
    assert target.stacked is (rows == 5)


def test_both_latent_projections_are_one_matrix_when_queries_have_one():
    attention = "model.layers.0.self_attn."
    query, key = (row_of(f"{attention}{name}.weight") for name in ("q_a_proj", "kv_a_proj_with_mqa"))
    joined = engine_tensor(query, SHAPE, DEEPSEEK)
    assert joined == engine_tensor(key, SHAPE, DEEPSEEK) and joined.rows == 2
    assert joined.name == f"{attention}fused_qkv_a_proj_with_mqa.weight"
    assert joined.join([torch.zeros(6, 3), torch.ones(6, 3)]).tolist() == [[0.0] * 3] * 6 + [[1.0] * 3] * 6
    # without a query latent nothing is joined
    latent = dataclasses.replace(SHAPE.latent, q_lora_rank=None)
    plain = dataclasses.replace(SHAPE, latent=latent)
    assert engine_tensor(row_of(key.hf[0].name, plain), plain, DEEPSEEK).name == key.hf[0].name


def test_gate_and_up_of_an_expert_are_padded_and_sharded_separately():
    row = row_of("model.layers.0.mlp.experts.0.gate_proj.weight")
    gate, up = torch.arange(120.0).view(40, 3) + 1, -torch.arange(120.0).view(40, 3) - 1
    on_gpu = engine_shard(row, [gate, up], SHAPE, EngineLayout(2, on_host=False), 1)
    assert torch.equal(on_gpu, torch.cat([gate[20:], up[20:]]))
    # on the CPU 40 becomes 64: rank 0 holds rows 0 to 31, rank 1 the last eight and zeros
    on_cpu = engine_shard(row, [gate, up], SHAPE, EngineLayout(2, on_host=True), 1)
    zeros = torch.zeros(24, 3)
    assert torch.equal(on_cpu, torch.cat([gate[32:], zeros, up[32:], zeros]))


@pytest.mark.parametrize(
    ("rows", "ranks", "each"),
    [
        (60, 2, 32),  # 64 in total, which 2 ranks divide
        (64, 2, 32),
        (65, 2, 64),
        (60, 3, 64),  # 64 is no multiple of 3, so 64 for each
        (130, 3, 64),  # 192 is one
    ],
)
def test_vocabulary_is_padded_to_64_rows_or_64_per_rank(rows, ranks, each):
    table = torch.arange(rows * 3.0).view(rows, 3) + 1
    row = row_of("model.embed_tokens.weight")
    held = [engine_shard(row, [table], SHAPE, EngineLayout(ranks, on_host=False), rank) for rank in range(ranks)]
    assert [len(part) for part in held] == [each] * ranks
    assert torch.equal(torch.cat(held)[:rows], table) and not torch.cat(held)[rows:].any()


def test_packed_gate_and_up_is_sharded_by_halves():
    dense = dataclasses.replace(SHAPE, moe_layers=(False,), experts=None, latent=None)
    row = row_of("model.layers.0.mlp.gate_up_proj.weight", dense, family_for({"model_type": "glm4"}))
    packed = torch.arange(384.0).view(128, 3)
    shard = engine_shard(row, [packed], dense, EngineLayout(2, on_host=True), 0)
    assert torch.equal(shard, torch.cat([packed[:32], packed[64:96]]))


def test_shared_experts_are_as_wide_as_padded_routed_ones():
    two = dataclasses.replace(SHAPE.experts, shared_ffn_hidden_size=80)  # two of 40; 40 becomes 64
    shape = dataclasses.replace(SHAPE, experts=two)
    row = row_of("model.layers.0.mlp.shared_experts.down_proj.weight", shape)
    down = torch.arange(240.0).view(3, 80)
    shard = engine_shard(row, [down], shape, EngineLayout(2, on_host=True), 1)
    assert torch.equal(shard, torch.cat([down[:, 64:], torch.zeros(3, 48)], dim=1))


def test_glm_router_is_kept_in_float32():
    row = row_of("model.layers.0.mlp.gate.weight")
    half = torch.tensor([[1.5, 0.25, -3.0]], dtype=torch.bfloat16)
    assert engine_tensor(row, SHAPE, DEEPSEEK).join([half]).dtype == torch.bfloat16
    kept = engine_tensor(row, SHAPE, family_for({"model_type": "glm4_moe"})).join([half])
    assert kept.dtype == torch.float32 and kept.tolist() == half.tolist()


DENSE = dataclasses.replace(SHAPE, moe_layers=(False,), experts=None, latent=None)


@pytest.mark.parametrize(
    ("tensor", "engine"),
    [
        ("self_attn.q_proj.weight", "self_attn.qkv_proj.weight"),
        ("mlp.gate_proj.weight", "mlp.gate_up_proj.weight"),
        ("mlp.down_proj.weight", "mlp.down_proj.weight"),
        ("self_attn.o_proj.weight", "self_attn.o_proj.weight"),
    ],
)
def test_only_projections_fused_by_the_engine_are_renamed(tensor, engine):
    family = family_for({"model_type": "qwen3"})
    row = row_of(f"model.layers.0.{tensor}", DENSE, family)
    assert engine_tensor(row, DENSE, family).name == f"model.layers.0.{engine}"


@pytest.mark.parametrize(
    ("ranks", "keys"), [(2, [[0, 1], [2, 3]]), (4, [[0], [1], [2], [3]]), (8, [[0], [0], [1], [1]])]
)
def test_key_heads_are_sharded_and_repeated_when_fewer_than_ranks(ranks, keys):
    shape = dataclasses.replace(DENSE, num_attention_heads=8, kv_channels=1)
    row = row_of("model.layers.0.self_attn.q_proj.weight", shape, family_for({"model_type": "qwen3"}))
    query, key, value = torch.zeros(8, 3), torch.arange(4.0).view(4, 1).expand(4, 3), torch.full((4, 3), -1.0)
    for rank, heads in enumerate(keys):
        held = engine_shard(row, [query, key, value], shape, EngineLayout(ranks, on_host=False), rank)
        width = len(heads)
        assert len(held) == 8 // ranks + 2 * width
        assert held[8 // ranks : 8 // ranks + width, 0].tolist() == heads


def test_packed_gate_and_up_is_padded_only_in_its_rows():
    row = row_of("model.layers.0.mlp.gate_up_proj.weight", DENSE, family_for({"model_type": "glm4"}))
    shape = dataclasses.replace(DENSE, ffn_hidden_size=40)
    packed = torch.arange(240.0).view(80, 3) + 1
    held = engine_shard(row, [packed], shape, EngineLayout(2, on_host=True), 1)
    zeros = torch.zeros(24, 3)
    assert torch.equal(held, torch.cat([packed[32:40], zeros, packed[72:], zeros]))
