"""Who sends which elements to whom: copies by the plan against gathered tensors in the engine's layout."""

from __future__ import annotations

import collections
import dataclasses
import itertools

import pytest
import torch

from slimrl.engines.sglang.weight_loaders import describe
from slimrl.models.families import family_for
from slimrl.models.model_spec import Experts, LatentAttention, ModelSpec
from slimrl.weights.point_to_point.engine_side import differences
from slimrl.weights.point_to_point.plan import Holding, Place, Target, make_plan
from slimrl.weights.reshard import hf_shapes, to_shard
from slimrl.weights.update.verify import EngineLayout, engine_shard, engine_tensor

DENSE = ModelSpec(
    hidden_size=12,
    ffn_hidden_size=40,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=4,
    vocab_size=117,
    padded_vocab_size=128,
    tied=True,
    qk_layernorm=True,
    qkv_bias=True,
    moe_layers=(False, False),
)
MOE = dataclasses.replace(
    DENSE,
    tied=False,
    moe_layers=(False, True),
    experts=Experts(number=4, top_k=2, ffn_hidden_size=24, shared_ffn_hidden_size=48, expert_bias=True),
)
LATENT = LatentAttention(q_lora_rank=6, kv_lora_rank=4, qk_head_dim=2, qk_pos_emb_head_dim=2, v_head_dim=2)
MODELS = {
    "qwen3": DENSE,
    "qwen2": dataclasses.replace(DENSE, qk_layernorm=False, tied=False),
    "glm4": dataclasses.replace(DENSE, norms_per_layer=4),  # gate and up packed in one tensor
    "qwen3_moe": dataclasses.replace(
        MOE, experts=dataclasses.replace(MOE.experts, shared_ffn_hidden_size=0, expert_bias=False)
    ),
    "glm4_moe": MOE,  # a router in float32
    "deepseek_v3": dataclasses.replace(MOE, latent=LATENT, qkv_bias=False, qk_layernorm=False),
}


def rows_of(name):
    return list(family_for({"model_type": name}).rows(MODELS[name]))


def full_tensors(name):
    """The Hugging Face tensors of each row, in bfloat16 but for the router's bias; no two elements alike by chance."""
    generator = torch.Generator().manual_seed(0)
    return [
        [
            torch.randn(shape, generator=generator).to(torch.float32 if "bias" in part.name else torch.bfloat16)
            for part, shape in zip(row.hf, hf_shapes(row, MODELS[name]), strict=True)
        ]
        for row in rows_of(name)
    ]


def trainer(name, *, tensor=1, stages=1, experts=1, expert_tensor=1, data=1):
    """The tensors and the `Holding` of each rank: stages outermost, then replicas, expert ranks, tensor ranks."""
    spec, rows = MODELS[name], rows_of(name)
    tensors = full_tensors(name)
    ranks = []
    for stage, _, expert_rank, rank in itertools.product(range(stages), range(data), range(experts), range(tensor)):
        own = {}
        expert_shard = (expert_rank * tensor + rank) % expert_tensor
        for number, (row, parts) in enumerate(zip(rows, tensors, strict=True)):
            if number * stages // len(rows) != stage:
                continue
            if row.expert is not None:
                if row.expert * experts // spec.num_experts != expert_rank:
                    continue
                own[row.megatron[0]] = to_shard(row, parts, spec, rank=expert_shard, size=expert_tensor)
            else:
                own[row.megatron[0]] = to_shard(row, parts, spec, rank=rank, size=tensor)
        dtypes = {name: tensor.dtype for name, tensor in own.items()}
        ranks.append((own, Holding(dtypes, rank, tensor, expert_shard, expert_tensor)))
    return ranks


def received(plan, ranks, place, size):
    """The tensors of an engine rank after all messages, which are packed and unpacked as in an update."""
    targets = plan.targets[size, place.rank]  # of which one may be padding alone
    into = {name: torch.zeros(target.rows, target.columns) for name, target in targets.items()}
    for sender, messages in plan.received_by(place).items():
        for message in messages:
            starts, length = plan.offsets(message)
            packed = torch.empty(length, dtype=torch.uint8)
            for copy, start in zip(message, starts, strict=True):
                taken = copy.of_source(ranks[sender][0][copy.source])
                packed[start : start + taken.nbytes].view(taken.dtype).view(taken.shape).copy_(taken)
            for copy, start in zip(message, starts, strict=True):
                dtype = plan.dtypes[copy.source]
                values = packed[start : start + copy.elements * dtype.itemsize].view(dtype)
                below = into[copy.target][copy.target_row :, copy.target_column :]
                below[: copy.rows, : copy.columns] = values.view(copy.rows, copy.columns)
    return into


def gathered(name, size, rank, *, on_host):
    """The same from the full tensors, as the servers' values are checked."""
    spec, family = MODELS[name], family_for({"model_type": name})
    shards = collections.defaultdict(list)
    targets = {}
    for row, parts in zip(rows_of(name), full_tensors(name), strict=True):
        target = engine_tensor(row, spec, family)
        targets[target.name] = target
        shards[target.name].append(engine_shard(row, parts, spec, EngineLayout(size, on_host), rank))
    return {name: targets[name].join(parts).float() for name, parts in shards.items()}


LAYOUTS = {
    "TP4 to TP2": (dict(tensor=4), [2]),
    "TP2 to TP1": (dict(tensor=2), [1]),
    "TP1 to TP4": (dict(), [4]),
    "TP2 to TP8, with fewer key heads than ranks": (dict(tensor=2), [8]),
    "PP2 with TP2": (dict(stages=2, tensor=2), [1, 4]),
    "EP2 with replicated attention": (dict(experts=2), [2]),
    "EP2 with experts in two shards": (dict(experts=2, tensor=2, expert_tensor=2), [1, 2]),
    "PP2, EP2, four engines of three sizes": (dict(stages=2, experts=2, data=2), [1, 1, 2, 4]),
}


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_every_engine_rank_gets_the_bits_of_the_gathered_tensors(name, layout, on_host):
    parallel, sizes = LAYOUTS[layout]
    ranks = trainer(name, **parallel)
    spec, family = MODELS[name], family_for({"model_type": name})
    plan = make_plan([holding for _, holding in ranks], sizes, spec, family, on_host=on_host, buffer_bytes=2000)
    for engine, size in enumerate(sizes):
        for rank in range(size):
            into = received(plan, ranks, Place(engine, rank), size)
            wanted = gathered(name, size, rank, on_host=on_host)
            assert into.keys() == wanted.keys()
            for target, tensor in wanted.items():
                assert torch.equal(into[target].flatten(), tensor.flatten()), target


def test_replicas_share_the_work_and_no_byte_is_sent_twice():
    """Of two replicas with one engine each sends half, with two engines each serves one; of four, each a quarter."""
    spec, family = MODELS["qwen3"], family_for({"model_type": "qwen3"})
    whole = sum(tensor.nbytes for parts in full_tensors("qwen3") for tensor in parts)
    for replicas, engines, receivers in ((2, 1, 1), (2, 2, 1), (4, 1, 1), (4, 8, 2)):
        ranks = trainer("qwen3", data=replicas)
        holdings = [holding for _, holding in ranks]
        plan = make_plan(holdings, [1] * engines, spec, family, on_host=False, buffer_bytes=10**6)
        sent = [
            sum(copy.elements * 2 for messages in plan.sent_by(rank).values() for one in messages for copy in one)
            for rank in range(replicas)
        ]
        assert sum(sent) == engines * whole and plan.peers[0] == receivers
        assert max(sent) - min(sent) < 0.2 * whole, (replicas, engines, sent)


@pytest.mark.parametrize("buffer_bytes", [1, 999, 10_000])
def test_messages_of_a_round_fit_the_buffer_unless_one_row_is_longer(buffer_bytes):
    ranks = trainer("qwen3_moe", tensor=2, experts=2)
    spec, family = MODELS["qwen3_moe"], family_for({"model_type": "qwen3_moe"})
    holdings = [holding for _, holding in ranks]
    plan = make_plan(holdings, [1, 2], spec, family, on_host=False, buffer_bytes=buffer_bytes)
    longest_row = max(copy.columns * 4 for own in plan.messages.values() for one in own for copy in one)
    assert plan.message_bytes * max(plan.peers) <= max(buffer_bytes, (longest_row + 16) * max(plan.peers))


def test_tensor_that_no_rank_has_is_named():
    ((_, holding),) = trainer("qwen3")
    short = dataclasses.replace(holding, dtypes={n: d for n, d in holding.dtypes.items() if "final" not in n})
    family = family_for({"model_type": "qwen3"})
    with pytest.raises(ValueError, match=r"no trainer rank has decoder.final_layernorm.weight"):
        make_plan([short], [1], MODELS["qwen3"], family, on_host=True, buffer_bytes=1000)


def test_differences_of_an_engine_are_named():
    targets = {"a": Target(4, 3, 12), "stack": Target(6, 5, 30), "gone": Target(1, 1, 1)}
    same = {"shapes": {"a": [4, 3], "stack": [2, 3, 5], "gone": [1]}, "not_contiguous": [], "other_form": []}
    assert differences(same, targets) == []
    other = {
        "shapes": {"a": [3, 4], "stack": [2, 3, 5], "head": [7]},
        "not_contiguous": ["stack"],
        "other_form": ["layers.0.mlp"],
    }
    assert differences(other, targets) == [
        "the weights of layers.0.mlp are quantised or packed",
        "it has no gone",
        "it has head, which the trainer does not send",
        "it has other shapes: a [3, 4] instead of 4 x 3",
        "stack are not contiguous",
    ]


def test_rank_describes_layers_whose_weights_have_another_form():
    class UnquantizedMethod:
        pass

    class Fp8Method:
        pass

    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 3) for name in ("plain", "packed", "permuted", "quantised")})
    model["plain"].quant_method = UnquantizedMethod()
    model["packed"].use_intel_amx_backend = True
    model["permuted"].quant_method = UnquantizedMethod()
    model["permuted"].quant_method.use_flashinfer_trtllm_moe = True
    model["quantised"].quant_method = Fp8Method()
    described = describe(model)
    assert described["other_form"] == ["packed", "permuted", "quantised"]
    assert described["shapes"]["plain.weight"] == [3, 2] and described["not_contiguous"] == []
