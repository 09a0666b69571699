"""Advantages per token, and flags as megatron-core's configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron import tiny


@pytest.fixture
def lone_group() -> Any:
    """A process group of one."""
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def advantages(group: Any, **changes: Any) -> tuple[torch.Tensor, Any]:
    from slimrl.megatron.training.advantages import token_advantages

    batch = tiny.recorded_rollout(0, samples=4)
    log_probs = torch.linspace(-2, -1, batch.loss_mask.numel())
    args = tiny.tiny_args(kl_loss_type="k1", **changes)
    return token_advantages(args, batch, log_probs, log_probs - 0.5, None, group)[0], batch


def test_every_token_has_the_reward_of_its_sample(lone_group: Any):
    values, batch = advantages(lone_group)
    assert values.tolist() == [
        reward
        for reward, length in zip(batch.rewards.tolist(), batch.response_lengths.tolist(), strict=True)
        for _ in range(length)
    ]


def test_kl_penalty_is_subtracted_from_each_token(lone_group: Any):
    plain, _ = advantages(lone_group)
    penalised, _ = advantages(lone_group, kl_coef=0.2)
    torch.testing.assert_close(plain - penalised, torch.full_like(plain, 0.2 * 0.5))


def test_normalized_advantages_have_mean_0_and_std_1_over_trained_tokens(lone_group: Any):
    values, batch = advantages(lone_group, normalize_advantages=True)
    trained = values[batch.loss_mask > 0]
    assert float(trained.mean()) == pytest.approx(0, abs=1e-6)
    assert float(trained.std()) == pytest.approx(1, abs=1e-6)


def test_flags_set_the_megatron_model_config():
    from slimrl.megatron.config import transformer_config

    config = transformer_config(tiny.tiny_args(bf16=True, recompute_granularity="selective"))
    assert (config.num_query_groups, config.kv_channels, config.gated_linear_unit) == (2, 16, True)
    assert config.params_dtype == torch.bfloat16
    assert config.perform_initialization  # without it tensor-parallel gradient norms are silently wrong
    assert config.calculate_per_token_loss
    assert (config.hidden_dropout, config.attention_dropout) == (0.0, 0.0)


def test_sequence_parallelism_is_disabled_without_tensor_parallelism():
    from slimrl.megatron.config import transformer_config

    assert not transformer_config(tiny.tiny_args(sequence_parallel=True)).sequence_parallel
    wide = tiny.tiny_args(sequence_parallel=True, tensor_model_parallel_size=2)
    assert transformer_config(wide).sequence_parallel


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_features_that_need_transformer_engine_are_rejected_without_it():
    from slimrl.megatron.config import transformer_config
    from slimrl.megatron.model.model_builder import block_spec

    with pytest.raises(ValueError, match="--transformer-impl transformer_engine: Transformer Engine is not installed"):
        transformer_config(tiny.tiny_args(transformer_impl="transformer_engine"))
    with pytest.raises(ValueError, match="--normalization LayerNorm needs"):
        block_spec(transformer_config(tiny.tiny_args(normalization="LayerNorm")))


@pytest.mark.parametrize(("device", "refused"), [("meta", True), ("cpu", False)])  # meta: a device that is not the host
def test_torchs_adam_does_not_step_on_a_gpu_beside_state_in_host_memory(device: str, refused: bool):
    from slimrl.megatron.optimizer import check_device_part

    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1, device=device))])
    expected = pytest.raises(ValueError, match=r"--optimizer-offload-fraction 0\.5 leaves a part .* or give 1$")
    with expected if refused else contextlib.nullcontext():
        check_device_part(adam, 0.5)
    check_device_part(None, 1.0)


# cuda, Transformer Engine -> layers without --transformer-impl; Apex -> gradient accumulation fusion
LAYERS_AND_FUSION = {
    (False, False): ("local", {False: False, True: False}),
    (False, True): ("local", {False: False, True: False}),
    (True, False): ("local", {False: False, True: True}),
    (True, True): ("transformer_engine", {False: True, True: True}),
}


@pytest.mark.parametrize("apex", [False, True])
@pytest.mark.parametrize("machine", LAYERS_AND_FUSION)
def test_machine_selects_layers_and_gradient_fusion(
    monkeypatch: pytest.MonkeyPatch, machine: tuple[bool, bool], apex: bool
):
    from slimrl.megatron import config

    cuda, engine = machine
    layers, fused = LAYERS_AND_FUSION[machine]
    assert config.choose_transformer_impl(None, cuda=cuda, transformer_engine=engine) == layers
    assert config.choose_transformer_impl("local", cuda=cuda, transformer_engine=engine) == "local"
    assert config.fuses_weight_gradients(True, layers, cuda=cuda, apex=apex, fsdp=False) is fused[apex]
    assert not config.fuses_weight_gradients(True, layers, cuda=cuda, apex=apex, fsdp=True)
    assert config.fuses_weight_gradients(True, "local", cuda=cuda, apex=apex, fsdp=False) is (cuda and apex)
    assert not config.fuses_weight_gradients(False, layers, cuda=cuda, apex=apex, fsdp=False)
    monkeypatch.setattr(config, "is_cpu", lambda: not cuda)
    monkeypatch.setattr(config, "transformer_engine_installed", lambda: engine)
    monkeypatch.setattr(config, "apex_installed", lambda: apex)
    built = config.transformer_config(tiny.tiny_args(apply_rope_fusion=False))
    assert (built.transformer_impl, built.gradient_accumulation_fusion) == (layers, fused[apex])
    sharded = config.transformer_config(tiny.tiny_args(apply_rope_fusion=False, use_megatron_fsdp=True))
    assert not sharded.gradient_accumulation_fusion
    wanted = tiny.tiny_args(apply_rope_fusion=False, gradient_accumulation_fusion=False)
    assert not config.transformer_config(wanted).gradient_accumulation_fusion


def test_gradient_norm_is_reported_without_clipping():
    from slimrl.megatron.config import optimizer_config

    assert optimizer_config(tiny.tiny_args(clip_grad=0.0)).clip_grad == math.inf
    assert optimizer_config(tiny.tiny_args(clip_grad=0.3)).clip_grad == 0.3


def test_schedule_needs_the_run_length():
    from slimrl.megatron.config import total_optimizer_steps

    args = tiny.tiny_args(num_rollout=5, num_steps_per_rollout=2)
    assert total_optimizer_steps(args.num_rollout, args.num_steps_per_rollout) == 10
    with pytest.raises(ValueError, match="--num-rollout is None"):
        total_optimizer_steps(None, args.num_steps_per_rollout)


def test_reference_swap_restores_the_policy_weights_bit_for_bit():
    from slimrl.megatron.ref_model import ReferenceWeights

    model = torch.nn.Linear(3, 3)
    reference = ReferenceWeights([model])
    kept = {name: value.detach().clone() for name, value in model.named_parameters()}
    with torch.no_grad():
        model.weight.mul_(3.1).add_(0.7)
    changed = model.weight.detach().clone()
    place = model.weight.data_ptr()
    with pytest.raises(RuntimeError, match="inside"), reference.loaded_weights():
        assert torch.equal(model.weight, kept["weight"])
        raise RuntimeError("inside")
    assert torch.equal(model.weight, changed)
    assert model.weight.data_ptr() == place


def test_reference_has_the_tensors_of_a_checkpoint_and_no_tables():
    from slimrl.megatron.ref_model import ReferenceWeights

    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    model[0].register_buffer("expert_bias", torch.ones(2))
    model[0].register_buffer("cos_cached", torch.ones(4), persistent=False)
    reference = ReferenceWeights([model])
    assert [tensor.shape for tensor in reference.tensors] == [(3, 3), (3,), (2,)]
    model[0].register_buffer("cos_cached", torch.zeros(8), persistent=False)  # of longer sequences
    model[0].expert_bias.zero_()
    with reference.loaded_weights():
        assert model[0].expert_bias.tolist() == [1, 1] and not model[0].cos_cached.any()
    assert model[0].expert_bias.tolist() == [0, 0]


def test_state_of_a_peer_has_buffers_and_no_rotary_tables():
    from slimrl.megatron.training import step_state

    stage = torch.nn.Sequential(torch.nn.Linear(3, 3))
    for name in ("expert_bias", "local_tokens_per_expert", "cos_cached", "sin_cached"):
        stage[0].register_buffer(name, torch.ones(2), persistent=name == "expert_bias")
    model: Any = types.SimpleNamespace(stages=[stage])
    held = [step_state.RestoredModel(model, {})]
    assert dict(step_state._buffers(held)).keys() == {"0.0.0.expert_bias", "0.0.0.local_tokens_per_expert"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a stream orders what gloo does not")
def test_tensors_of_pending_gloo_sends_are_not_freed():
    from slimrl.megatron.config import transformer_config

    stages = tiny.tiny_args(pipeline_model_parallel_size=2)
    assert transformer_config(stages).deallocate_pipeline_outputs
    virtual = tiny.tiny_args(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    assert not transformer_config(virtual).deallocate_pipeline_outputs


def config_fields() -> list[tuple[str, str, Any]]:
    """(class, field, default) of every configuration field that flags describe."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    found = []
    for kind in (TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig):
        for field in dataclasses.fields(kind):
            default = field.default_factory() if callable(field.default_factory) else field.default
            found.append((kind.__name__, field.name, default))
    return found


# fields with another default in slimrl than in megatron-core, and why
DIFFERENT_DEFAULTS = {
    # Megatron-LM's own defaults, which its programs pass to the configuration
    "gradient_accumulation_fusion",
    "overlap_p2p_comm",
    "deallocate_pipeline_outputs",
    "masked_softmax_fusion",
    "persist_layer_norm",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "attention_softmax_in_fp32",
    "normalization",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "rotary_scaling_factor",
    "optimizer_offload_fraction",
    "barrier_with_L1_time",
    "align_param_gather",
    "check_for_nan_in_grad",
    # without a correct default
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "lr",
    "min_lr",
    # chosen for reinforcement learning with packed samples
    "use_distributed_optimizer",
    "hidden_dropout",
    "attention_dropout",
    "moe_token_dispatcher_type",
    "mtp_loss_scaling_factor",
    # decided by the machine or by another flag
    "transformer_impl",
    "rope_type",
    "fp8_recipe",
    # the same values, spelled as text
    "attention_backend",
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
}


@pytest.mark.parametrize(("kind", "field", "default"), config_fields(), ids=lambda value: str(value)[:40])
def test_every_megatron_config_field_is_a_flag_with_its_default(kind: str, field: str, default: Any):
    from slimrl.arguments import Arguments
    from slimrl.megatron.config import _FLAG_OF_FIELD, _NOT_FLAGS, _ONE_OR_MANY

    if field in _NOT_FLAGS:
        assert callable(default) or default is None or isinstance(default, torch.dtype | bool)
        return
    value = vars(Arguments())[_FLAG_OF_FIELD.get(field, field)]  # KeyError: the field has no flag
    if field in _ONE_OR_MANY and value:
        value = value[0]
    assert value == default or field in DIFFERENT_DEFAULTS


# flags of older scripts that describe what always holds
SAYS_WHAT_HOLDS = {
    "train_backend",
    "add_position_embedding",
    "use_rotary_position_embeddings",
    "dist_ckpt_optim_fully_reshardable",
    "override_opt_param_scheduler",
}


def test_every_supported_flag_is_used():
    import slimrl
    from slimrl.arguments.namespace import all_flag_specs
    from slimrl.megatron.config import _FLAG_OF_FIELD

    forwarded = {_FLAG_OF_FIELD.get(field, field) for _, field, _ in config_fields()}
    package = Path(slimrl.__file__).parent
    source = "\n".join(path.read_text() for path in package.rglob("*.py") if path.parent.name != "flags")
    # the namespace or one of its groups, under any local name
    holders = {"args", *re.findall(r"(\w+): \"?\w*Arguments\b", source)}
    read = set(re.findall(rf"(?:\b_?(?:{'|'.join(holders)})\.|values\.get\(\")(\w+)", source)) | forwarded
    served = {spec.dest for spec in all_flag_specs() if spec.not_served is None or spec.served}
    assert served - read == SAYS_WHAT_HOLDS


def test_moe_and_mla_flags_set_the_megatron_config():
    from megatron.core.transformer import MLATransformerConfig

    from slimrl.megatron.config import transformer_config

    experts = tiny.tiny_args(
        num_experts=4, moe_layer_freq=[0, 1], moe_ffn_hidden_size=48, moe_router_score_function="sigmoid"
    )
    config = transformer_config(experts)
    assert (config.num_moe_experts, config.moe_layer_freq, config.moe_ffn_hidden_size) == (4, [0, 1], 48)
    assert config.moe_router_load_balancing_type == "aux_loss" and config.moe_aux_loss_coeff == 0.0
    latent = transformer_config(tiny.tiny_args(multi_latent_attention=True, kv_lora_rank=24, rope_type="rope"))
    assert isinstance(latent, MLATransformerConfig)
    assert (latent.kv_lora_rank, latent.q_lora_rank, latent.rope_type) == (24, None, "rope")


def test_reinforce_plus_plus_gives_each_token_its_discounted_return(lone_group: Any):
    changes = dict(advantage_estimator="reinforce_plus_plus", gamma=0.9, kl_coef=0.2)
    values, batch = advantages(lone_group, **changes)
    position = 0
    for reward, length in zip(batch.rewards.tolist(), batch.response_lengths.tolist(), strict=True):
        mask = batch.loss_mask[position : position + length].tolist()
        last = max((token for token in range(length) if mask[token]), default=None)
        running, expected = 0.0, []
        for token in reversed(range(length)):  # the test's KL is 0.5 everywhere
            running = (reward if token == last else 0.0) - 0.2 * 0.5 * bool(mask[token]) + 0.9 * running
            expected.append(running)
        assert values[position : position + length].tolist() == pytest.approx(expected[::-1], rel=1e-5)
        position += length


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_missing_kernels_are_named():
    from slimrl.megatron.config import kernels_without_effect

    assert kernels_without_effect(tiny.tiny_args()) == []
    wanted = tiny.tiny_args(moe_permute_fusion=True, moe_grouped_gemm=True, use_precision_aware_optimizer=True)
    assert set(kernels_without_effect(wanted)) == {
        "--moe-permute-fusion",
        "--moe-grouped-gemm",
        "--use-precision-aware-optimizer",
    }
    wanted.optimizer_cpu_offload = True  # for which there is no kernel
    assert set(kernels_without_effect(wanted)) == {"--moe-permute-fusion", "--moe-grouped-gemm"}
    assert kernels_without_effect(tiny.tiny_args(cp_comm_type=["a2a"])) == []  # no context parallelism
    assert kernels_without_effect(tiny.tiny_args(cp_comm_type=["a2a"], context_parallel_size=2)) == ["--cp-comm-type"]


def with_token_rewards() -> tuple[Any, list[list[float]], list[list[float]], list[list[int]]]:
    """Two samples; the tool's token of the first is masked. The batch, and rewards, values and masks of its tokens."""
    from slimrl.data.sample import Sample
    from slimrl.data.train_batch import batch_from_samples

    rewards = [[0.5, -1.0, 0.0, 0.25, 2.0], [0.0, 1.5, -0.75]]
    values = [[0.3, -0.2, 9.0, 0.7, 1.1], [-0.4, 0.6, 0.2]]
    masks = [[1, 1, 0, 1, 1], [1, 1, 1]]
    samples = [
        Sample(
            "",
            group_index=row,
            index=row,
            tokens=[0] * (2 + len(own)),
            response_length=len(own),
            rollout_log_probs=[0.0] * len(own),
            loss_mask=mask,
            token_rewards=own,
        )
        for row, (own, mask) in enumerate(zip(rewards, masks, strict=True))
    ]
    outcome = torch.tensor([1.0, -3.0])
    return batch_from_samples(samples, outcome, outcome), rewards, values, masks


def returns_of(estimator: str, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from slimrl.arguments import Arguments
    from slimrl.megatron.training.advantages import token_returns

    batch, _, values, _ = with_token_rewards()
    column = torch.tensor([one for row in values for one in row])
    flags = Arguments(advantage_estimator=estimator, **changes)
    return token_returns(flags, batch, torch.zeros(8), None, column)


def generalised_by_hand(gamma: float, *lambdas: float) -> tuple[list[float], list[float]]:
    """Advantages and returns of the samples of `with_token_rewards`, 0 where masked; one lambda, or one of each."""
    _, rewards, values, masks = with_token_rewards()
    expected = []
    lambdas = lambdas * 2 if len(lambdas) == 1 else lambdas
    for own, value, mask, outcome, lambd in zip(rewards, values, masks, [1.0, -3.0], lambdas, strict=True):
        acted = [place for place, trained in enumerate(mask) if trained]
        advantages = [0.0] * len(own)
        for number, place in enumerate(acted):
            for ahead, later in enumerate(acted[number:]):  # Schulman et al. 2016, equation 16: a sum over deltas
                last = later == acted[-1]
                following = 0.0 if last else value[acted[acted.index(later) + 1]]
                delta = own[later] + (outcome if last else 0.0) + gamma * following - value[later]
                advantages[place] += (gamma * lambd) ** ahead * delta
        expected += advantages
    flat = [
        value if trained else 0.0
        for row, mask in zip(values, masks, strict=True)
        for value, trained in zip(row, mask, strict=True)
    ]
    return expected, [one + value for one, value in zip(expected, flat, strict=True)]


@pytest.mark.parametrize("of_critic", [None, 0.8, 1.0, 0.0])
def test_token_rewards_reach_the_generalised_advantages_of_their_tokens(of_critic: float | None):
    gamma, lambd = 0.9, 0.8
    advantages, targets = returns_of("ppo", gamma=gamma, lambd=lambd, critic_lambd=of_critic)
    assert advantages.tolist() == pytest.approx(generalised_by_hand(gamma, lambd)[0], abs=1e-6)
    wanted = generalised_by_hand(gamma, lambd if of_critic is None else of_critic)[1]
    assert targets.tolist() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("of_critic", [None, 0.5])
def test_lambda_of_the_advantages_alone_depends_on_the_trained_tokens(of_critic: float | None):
    masks = with_token_rewards()[3]
    own = [1 - 1 / (0.7 * sum(mask)) for mask in masks]
    assert min(own) > 0 and own[0] != own[1]
    advantages, targets = returns_of("ppo", gamma=0.9, length_adaptive_gae_alpha=0.7, critic_lambd=of_critic)
    assert advantages.tolist() == pytest.approx(generalised_by_hand(0.9, *own)[0], abs=1e-6)
    wanted = generalised_by_hand(0.9, 1.0 if of_critic is None else of_critic)[1]  # 1 is the default
    assert targets.tolist() == pytest.approx(wanted, abs=1e-6)


def test_token_rewards_are_discounted_from_their_tokens():
    returns, _ = returns_of("reinforce_plus_plus", gamma=0.5)
    first = [0.5, -1.0, 0.0, 0.25, 2.0 + 1.0]
    second = [0.0, 1.5, -0.75 - 3.0]
    expected = [sum(0.5**n * r for n, r in enumerate(row[at:])) for row in (first, second) for at in range(len(row))]
    assert returns.tolist() == pytest.approx(expected, abs=1e-6)


def test_estimator_with_one_reward_per_response_rejects_token_rewards():
    with pytest.raises(ValueError, match="token_rewards have no place in --advantage-estimator grpo"):
        returns_of("grpo")


def value_columns(rows: list[list[float]], outputs: list[list[float]]) -> list[Any]:
    """Rollouts of returns and old values; the last token of each is masked and must not count."""
    from slimrl.megatron.training.critic import ValueColumns

    return [
        ValueColumns(torch.tensor(old), torch.tensor([*row, 1e6]), torch.tensor([1.0] * len(row) + [0.0]))
        for row, old in zip(rows, outputs, strict=True)
    ]


def test_value_scale_has_the_moments_of_all_returns_so_far(lone_group: Any):
    import numpy

    from slimrl.megatron.training.critic import ValueScale

    rows = [[1.0, 4.0, -2.0], [10.0, 12.5], [3.0]]
    scale, seen = ValueScale(True), []
    assert scale.to_values(torch.tensor([0.5])).tolist() == [0.5]  # before the first returns
    for row, columns in zip(rows, value_columns(rows, [[0.1] * 4, [0.2] * 3, [0.3] * 2]), strict=True):
        mean, std = scale.mean_and_std
        seen += row
        made = scale.add(columns, lone_group)
        everything = numpy.array(seen)
        assert scale.mean_and_std == pytest.approx((everything.mean(), everything.std(ddof=1)), rel=1e-12)
        expected = (numpy.array(row) - everything.mean()) / everything.std(ddof=1)
        assert made.returns[:-1].tolist() == pytest.approx(expected, abs=1e-6)
        assert (made.old_values * std + mean).tolist() == pytest.approx(columns.old_values.tolist(), abs=1e-6)
        assert scale.to_values(made.returns[:-1]).tolist() == pytest.approx(row, abs=1e-5)
    resumed = ValueScale(True)
    resumed.check(scale.numbers, Path("critic"), resumed=True)
    assert resumed.mean_and_std == scale.mean_and_std


def test_value_scale_ignores_returns_that_are_not_finite_and_critics_of_other_units(lone_group: Any):
    from slimrl.megatron.training.critic import ValueScale

    (columns,) = value_columns([[1.0, float("nan")]], [[0.0] * 3])
    scale = ValueScale(True)
    scale.add(columns, lone_group)
    assert scale.mean_and_std == (0.0, 1.0)
    plain = ValueScale(False)
    assert plain.add(columns, lone_group) is columns and plain.numbers == {}
    with pytest.raises(ValueError, match="critic was trained with --normalize-values: add it"):
        plain.check(scale.numbers, Path("critic"), resumed=False)
    with pytest.raises(ValueError, match="critic was trained without --normalize-values: leave it out"):
        scale.check({}, Path("critic"), resumed=True)
    scale.check({}, Path("judge"), resumed=False)  # a new run may begin with any model


def test_weights_are_marked_as_what_they_are_whatever_transformer_engine_says():
    """Its layers mark a whole down-projection as a shard, and the output projections of experts as cut in rows."""
    from slimrl.megatron.model.model_builder import mark_parameters

    class Weights(torch.nn.Module):
        def __init__(self, **marks: Any) -> None:
            super().__init__()
            for name in ("weight", "weight0"):
                setattr(self, name, torch.nn.Parameter(torch.zeros(2, 2)))
                for mark, value in marks.items():
                    setattr(getattr(self, name), mark, value)

    cut = {"tensor_model_parallel": True, "partition_dim": 0}
    experts = torch.nn.ModuleDict({"linear_fc1": Weights(**cut), "linear_fc2": Weights(**cut)})
    attention = torch.nn.ModuleDict({"linear_q_down_proj": Weights(**cut), "linear_q_up_proj": Weights(**cut)})
    whole = torch.nn.ModuleDict({"linear_fc2": Weights()})  # --expert-tensor-parallel-size 1
    mlps = torch.nn.ModuleDict({"experts": experts})
    model = torch.nn.ModuleDict({"attention": attention, "mlp": mlps, "other": torch.nn.ModuleDict({"experts": whole})})
    mark_parameters(model)
    names = ("allreduce", "tensor_model_parallel", "partition_dim")
    found = {name: [getattr(one, mark, None) for mark in names] for name, one in model.named_parameters()}
    assert found["mlp.experts.linear_fc1.weight0"] == [False, True, 0]
    assert found["mlp.experts.linear_fc2.weight0"] == [False, True, 1]
    assert found["attention.linear_q_down_proj.weight"] == [None, False, -1]
    assert found["attention.linear_q_up_proj.weight"] == [None, True, 0]
    assert found["other.experts.linear_fc2.weight0"] == [False, None, None]
