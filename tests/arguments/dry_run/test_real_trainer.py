"""The exact part of the estimate against the bytes that real ranks of Megatron hold."""

from __future__ import annotations

import dataclasses

import pytest

from slimrl.arguments.dry_run.plan import estimate
from slimrl.arguments.layout import stage_layers
from slimrl.models.adapters import AdapterConfig, adapter_weights
from slimrl.models.model_size import Split, critic_weights, stage_weights
from slimrl.models.model_spec import ModelSpec
from tests.arguments.dry_run.held import held_bytes
from tests.megatron.launch import RankPool
from tests.megatron.tiny import tiny_args

pytestmark = pytest.mark.slow

EXPERTS = dict(num_experts=4, moe_ffn_hidden_size=32, moe_layer_freq=[0, 1], moe_router_topk=2)
SHARED = dict(moe_shared_expert_intermediate_size=48, moe_shared_expert_gate=True, moe_router_enable_expert_bias=True)
LATENT = dict(
    multi_latent_attention=True,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=12,
    num_query_groups=4,
)
# every tensor a multiple of 64 elements: the first share of a distributed optimizer has no padding
ALIGNED = dict(use_distributed_optimizer=True, kv_channels=64)
CASES = {
    "fp32": dict(use_distributed_optimizer=False),
    "bf16, untied": dict(use_distributed_optimizer=False, bf16=True, untie_embeddings_and_output_weights=True),
    "bf16, distributed": dict(bf16=True, **ALIGNED),
    "fp32, distributed": ALIGNED,
    "bf16, tensor": dict(bf16=True, tensor_model_parallel_size=2, add_qkv_bias=True),
    "bf16, stages": dict(bf16=True, pipeline_model_parallel_size=2),
    "bf16, experts": dict(bf16=True, **ALIGNED, expert_model_parallel_size=2, **EXPERTS, **SHARED),
    "bf16, latent": dict(bf16=True, tensor_model_parallel_size=2, sequence_parallel=True, **LATENT),
    "fp32, post norms": dict(post_self_attn_layernorm=True, post_mlp_layernorm=True),
}
SOME = ["q_proj", "v_proj", "down_proj"]
DIVIDED = dict(
    tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=1, expert_tensor_parallel_size=2
)
ADAPTERS = {  # beside weights that are not trained
    "fp32, adapters": dict(lora_rank=3),
    "bf16, distributed, adapters": dict(bf16=True, **ALIGNED, lora_rank=64),
    "bf16, tensor, adapters": dict(bf16=True, tensor_model_parallel_size=2, lora_rank=4, lora_target_modules=SOME),
    "bf16, experts, adapters": dict(
        bf16=True,
        lora_rank=2,
        expert_model_parallel_size=2,
        moe_shared_expert_intermediate_size=48,
        **EXPERTS,
    ),
    "bf16, latent, adapters": dict(
        bf16=True, lora_rank=4, tensor_model_parallel_size=2, sequence_parallel=True, **LATENT
    ),
    "bf16, latent keys alone, adapters": dict(bf16=True, lora_rank=64, **ALIGNED, **(LATENT | {"q_lora_rank": None})),
    "fp32, packed gate, adapters": dict(lora_rank=4, lora_target_modules=["o_proj", "gate_up_proj", "down_proj"]),
}
ADAPTERS["bf16, experts divided, adapters"] = ADAPTERS["bf16, experts, adapters"] | DIVIDED
CASES |= ADAPTERS
ADAPTED_CRITICS = {
    "bf16, tensor, critic of adapters": dict(bf16=True, tensor_model_parallel_size=2, critic_lora_rank=4),
    "bf16, stages, critic of adapters": dict(
        bf16=True, pipeline_model_parallel_size=2, critic_lora_rank=2, lora_rank=3
    ),
}
WORLD = 2


def case_args(name):
    changes = dict(moe_router_score_function="sigmoid") if "experts" in name else {}
    return tiny_args(
        actor_num_gpus_per_node=WORLD,
        debug_train_only=True,
        global_batch_size=4,
        rollout_max_response_len=16,
        rollout_max_prompt_len=16,
        **(CASES | ADAPTED_CRITICS)[name],
        **changes,
    )


@pytest.fixture(scope="module")
def held():
    """What both ranks hold, by case."""
    with RankPool(WORLD) as pool:
        return {name: pool.run(held_bytes, case_args(name)) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_planned_weights_gradients_and_optimizer_state_match_the_bytes_of_a_rank(held, name):
    stages = estimate(case_args(name)).stages
    for rank, one in enumerate(held[name]):
        stage = stages[rank] if len(stages) > 1 else stages[0]
        assert (one.weights, one.gradients) == (stage.weights, stage.gradients)
    # the last share of a distributed optimizer holds the buffer's padding, for which there is no state
    largest = max(one.optimizer for one in held[name]) if len(stages) == 1 else held[name][0].optimizer
    assert largest == stages[0].optimizer


@pytest.mark.parametrize("name", CASES)
def test_every_weight_tensor_has_the_counted_size(held, name):
    args = case_args(name)
    shape, stages = ModelSpec.from_args(args), stage_layers(args)
    split = Split(args.tensor_model_parallel_size, args.expert_tensor_parallel_size, args.expert_model_parallel_size)
    for rank, one in enumerate(held[name]):
        number = rank if len(stages) > 1 else 0
        weights = stage_weights(shape, split, stages[number], first=number == 0, last=number == len(stages) - 1)
        if name in ADAPTERS:
            weights += adapter_weights(shape, split, stages[number], AdapterConfig.from_args(args))
        assert sorted(weights.dense) == sorted(one.dense)
        assert sorted(weights.expert) == sorted(one.expert)


CRITICS = (
    "fp32",
    "bf16, distributed",
    "bf16, tensor",
    "bf16, stages",
    "bf16, experts",
    "bf16, latent",
    *ADAPTED_CRITICS,
)


@pytest.fixture(scope="module")
def held_by_critics():
    with RankPool(WORLD) as pool:
        return {name: pool.run(held_bytes, critic_args(name)) for name in CRITICS}


def critic_args(name):
    return dataclasses.replace(case_args(name), advantage_estimator="ppo")


@pytest.mark.parametrize("name", CRITICS)
def test_planned_memory_of_a_critic_matches_the_bytes_of_a_rank(held_by_critics, name):
    args, held = critic_args(name), held_by_critics[name]
    shape, parts, stages = ModelSpec.from_args(args), stage_layers(args), estimate(args).stages
    split = Split(args.tensor_model_parallel_size, 1, args.expert_model_parallel_size)
    for rank, one in enumerate(held):
        number = rank if len(stages) > 1 else 0
        assert one.gradients == stages[number].critic_gradients
        weights = critic_weights(shape, split, parts[number], first=number == 0, last=number == len(parts) - 1)
        if (adapters := AdapterConfig.of_critic(args)) is not None:
            weights += adapter_weights(shape, split, parts[number], adapters)
        assert sorted(weights.dense) == sorted(one.dense)
        assert sorted(weights.expert) == sorted(one.expert)
    largest = max(one.optimizer for one in held) if len(stages) == 1 else held[0].optimizer
    assert largest + held[0].weights == stages[0].critic

    plan = estimate(dataclasses.replace(args, critic_num_nodes=1, critic_num_gpus_per_node=WORLD))
    assert [(stage.critic, stage.critic_gradients) for stage in plan.stages] == [(0, 0)] * len(stages)
    for own, beside in zip(plan.critic, stages, strict=True):
        assert (own.weights + own.optimizer, own.gradients) == (beside.critic, beside.critic_gradients)
        assert own.loss == own.weight_update == own.host == 0


def test_distributed_optimizer_shards_add_up_to_the_full_state(held):
    args = dataclasses.replace(case_args("bf16, distributed"), use_distributed_optimizer=False)
    shares = held["bf16, distributed"]
    assert sum(one.optimizer for one in shares) == estimate(args).stages[0].optimizer
