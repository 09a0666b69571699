"""One rollout, trained on in two optimizer steps, gives the same result in every layout as plain autograd does."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.megatron import ranks, reference, tiny

pytestmark = pytest.mark.slow

SETTINGS = reference.ReferenceSettings(
    steps=2,
    per_token=False,
    eps_clip=0.02,
    eps_clip_high=0.03,
    kl_coef=0.1,
    entropy_coef=0.05,
    temperature=0.8,
    lr=2e-3,
    weight_decay=0.1,
    betas=(0.9, 0.95),
    eps=1e-6,
    clip_grad=0.5,
)
TP2 = {"tensor_model_parallel_size": 2}
TP2_SP = TP2 | {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VIRTUAL = PP2 | {"virtual_pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40}
SPREAD = {"use_distributed_optimizer": True}
OVERLAP = SPREAD | {"overlap_grad_reduce": True, "overlap_param_gather": True}

# name: ranks, model, flags
LAYOUTS = {
    "one rank": (1, "dense", {}),
    "micro-batches of four samples": (1, "dense", {"micro_batch_size": 4}),
    "dynamic micro-batches": (1, "dense", DYNAMIC),
    "padded to 64 tokens": (1, "dense", {"data_pad_size_multiplier": 64}),
    "a vocabulary padded to 256": (1, "dense", {"padded_vocab_size": 256}),
    "recomputed activations": (1, "dense", RECOMPUTE),
    "log-probabilities in chunks": (1, "dense", {"log_probs_chunk_size": 7, "micro_batch_size": 2}),
    "distributed optimizer": (1, "dense", SPREAD),
    "experts": (1, "experts", {}),
    "TP2": (2, "dense", TP2),
    "TP2 with sequence parallelism": (2, "dense", TP2_SP),
    "TP2 with everything": (2, "dense", TP2_SP | SPREAD | DYNAMIC | RECOMPUTE),
    "DP2": (2, "dense", {}),
    "DP2 with the distributed optimizer": (2, "dense", SPREAD),
    "DP2 dynamic and balanced": (2, "dense", DYNAMIC | {"balance_data": True}),
    "DP2 overlapped": (2, "dense", OVERLAP),
    "PP2": (2, "dense", PP2),
    "PP2 with everything": (2, "dense", PP2 | SPREAD | DYNAMIC | RECOMPUTE),
    "PP2 uneven": (2, "deep", PP2 | {"decoder_last_pipeline_num_layers": 1}),
    "PP2 virtual": (2, "deep", VIRTUAL),
    "PP2 virtual, dynamic": (2, "deep", VIRTUAL | DYNAMIC),
    "CP2": (2, "dense", CP2),
    "CP2 with everything": (2, "dense", CP2 | SPREAD | DYNAMIC | RECOMPUTE),
    "EP2": (2, "experts", EP2),
    "EP2 overlapped": (2, "experts", EP2 | OVERLAP),
    "EP2 with TP2": (2, "experts", EP2 | TP2_SP),
    "experts cut by TP2": (2, "experts", TP2_SP | {"expert_tensor_parallel_size": 2}),
    "EP2 with CP2": (2, "experts", EP2 | CP2),
    "TP2 PP2": (4, "dense", TP2_SP | PP2),
    "TP2 CP2": (4, "dense", TP2_SP | CP2),
    "CP2 PP2": (4, "dense", CP2 | PP2),
    "PP2 DP2": (4, "dense", PP2),
    "PP2 virtual DP2 overlapped": (4, "deep", VIRTUAL | OVERLAP),
    "EP2 PP2": (4, "experts", EP2 | PP2),
}


@pytest.fixture(scope="module")
def rollout() -> Any:
    return tiny.recorded_rollout(seed=5)


@pytest.fixture(scope="module")
def kinds(models: Any, deep_models: Any, expert_models: Any) -> dict[str, Any]:
    return {"dense": models, "deep": deep_models, "experts": expert_models}


@pytest.fixture(scope="module", params=[False, True], ids=["per-sample loss", "per-token loss"])
def expected(
    request: pytest.FixtureRequest, kinds: dict[str, Any], rollout: Any
) -> tuple[bool, dict[str, reference.ReferenceResult]]:
    """Whether the loss is per token, and what plain autograd makes of each model."""
    settings = dataclasses.replace(SETTINGS, per_token=request.param)
    return request.param, {
        name: reference.train(models.policy_hf, models.reference_hf, rollout, settings)
        for name, models in kinds.items()
    }


def flags(models: Any, **changes: Any) -> Any:
    return tiny.tiny_args(
        load=str(models.policy),
        ref_load=str(models.reference),
        use_kl_loss=True,
        kl_loss_coef=SETTINGS.kl_coef,
        kl_loss_type="k3",
        entropy_coef=SETTINGS.entropy_coef,
        eps_clip=SETTINGS.eps_clip,
        eps_clip_high=SETTINGS.eps_clip_high,
        rollout_temperature=SETTINGS.temperature,
        **models.flags,
        **changes,
    )


def relative_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """|actual - expected| / |expected|, over all tensors as one vector."""
    assert actual.keys() == expected.keys()
    wrong = sum(float((actual[name].double() - value).square().sum()) for name, value in expected.items())
    return (wrong / sum(float(value.square().sum()) for value in expected.values())) ** 0.5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_plain_autograd_does(
    layout: str, expected: Any, rollout: Any, kinds: Any, one_rank: Any, two_ranks: Any, four_ranks: Any
):
    size, kind, changes = LAYOUTS[layout]
    per_token, truths = expected
    truth, pool = truths[kind], {1: one_rank, 2: two_ranks, 4: four_ranks}[size]
    args = flags(kinds[kind], calculate_per_token_loss=per_token, **changes)
    result, *others = pool.run(ranks.train_once, args, rollout)
    for other in others:  # every rank reports the same numbers
        assert other == result.metrics
    assert [step["loss"] for step in result.metrics] == pytest.approx(truth.losses, rel=1e-5)
    assert [step["grad_norm"] for step in result.metrics] == pytest.approx(truth.gradient_norms, rel=1e-5)
    assert [step["pg_clipfrac"] for step in result.metrics] == pytest.approx(truth.clip_fractions, abs=1e-6)
    assert relative_error(result.weights, truth.weights) < 1e-5
    if not (args.use_distributed_optimizer and size > 1):  # there each rank reduces its own part only
        assert relative_error(result.gradients, truth.gradients) < 1e-5


@pytest.mark.parametrize("per_token", [False, True], ids=["per-sample loss", "per-token loss"])
def test_the_routers_balance_loss_has_its_weight_in_every_layout(
    per_token: bool, expert_models: Any, one_rank: Any, two_ranks: Any
):
    # whole samples are micro-batches without padding, whichever way they are cut
    rollout = tiny.recorded_rollout(seed=6, multiple=4)
    settings = dataclasses.replace(SETTINGS, per_token=per_token, balance_coef=0.5)
    truth = reference.train(expert_models.policy_hf, expert_models.reference_hf, rollout, settings)
    without = reference.train(
        expert_models.policy_hf, expert_models.reference_hf, rollout, dataclasses.replace(settings, balance_coef=0.0)
    )
    assert truth.gradient_norms[0] != pytest.approx(without.gradient_norms[0], rel=0.01)
    for pool, layout in ((one_rank, {}), (two_ranks, PP2), (two_ranks, TP2_SP), (two_ranks, CP2), (two_ranks, EP2)):
        args = flags(expert_models, calculate_per_token_loss=per_token, **layout)
        args.moe_router_load_balancing_type, args.moe_aux_loss_coeff = ["aux_loss"], [0.5]
        result = pool.run(ranks.train_once, args, rollout)[0]
        assert [step["loss"] for step in result.metrics] == pytest.approx(truth.losses, rel=1e-5)
        assert [step["grad_norm"] for step in result.metrics] == pytest.approx(truth.gradient_norms, rel=1e-5)
        assert relative_error(result.weights, truth.weights) < 1e-5


@pytest.mark.parametrize("kind", ["dense", "deep", "experts"])
def test_the_rollout_exercises_clip_kl_and_entropy(kind: str, expected: Any):
    truth = expected[1][kind]
    assert truth.clip_fractions[0] == 0.0
    assert 0.1 < truth.clip_fractions[1] < 0.9
    assert min(truth.gradient_norms) > SETTINGS.clip_grad  # gradient clipping is active as well


def test_before_the_first_update_the_ratio_is_one_and_the_kl_to_oneself_is_zero(
    rollout: Any, models: Any, two_ranks: Any
):
    args = flags(models, tensor_model_parallel_size=2)
    args.ref_load = str(models.policy)
    first, second = two_ranks.run(ranks.train_once, args, rollout)[0].metrics
    assert first["ratio_max_abs_diff"] < 1e-6
    assert abs(first["kl_loss"]) < 1e-12
    assert second["ratio_max_abs_diff"] > 0.05
    assert second["kl_loss"] > 1e-4


def test_progress_counts_the_micro_batches_of_all_three_passes(
    rollout: Any, deep_models: Any, one_rank: Any, two_ranks: Any
):
    total = 3 * len(rollout) // 2  # reference, log-probabilities before the update, training; two samples each
    whole = one_rank.run(ranks.train_once, flags(deep_models, micro_batch_size=2), rollout)[0]
    virtual = two_ranks.run(ranks.train_once, flags(deep_models, micro_batch_size=2, **VIRTUAL), rollout)[0]
    assert whole.progress == virtual.progress == [(number, total) for number in range(1, total + 1)]


def test_the_logged_mismatch_with_the_engine_is_over_trained_tokens(rollout: Any, models: Any, one_rank: Any):
    result = one_rank.run(ranks.train_once, flags(models), rollout)[0]
    policy = reference.load_model(models.policy_hf)
    gaps, start = [], 0
    with torch.no_grad():
        for sample in reference._split(rollout)[:4]:
            length = sample["mask"].numel()
            log_probs, *_ = reference._log_probs(policy, sample, SETTINGS.temperature)
            gap = (log_probs - rollout.rollout_log_probs[start : start + length]).abs()
            gaps.append(gap[sample["mask"] > 0])
            start += length
    gaps = torch.cat(gaps)
    first = result.metrics[0]
    assert first["tokens"] == gaps.numel()
    assert first["train_rollout_logprob_abs_diff_mean"] == pytest.approx(float(gaps.mean()), rel=1e-5)
    assert first["train_rollout_logprob_abs_diff_max"] == pytest.approx(float(gaps.max()), rel=1e-5)


@pytest.mark.parametrize("changes", [{}, SPREAD, PP2, CP2], ids=["DP2", "distributed optimizer", "PP2", "CP2"])
def test_bfloat16_stays_near_float32(changes: dict, rollout: Any, models: Any, two_ranks: Any):
    exact = two_ranks.run(ranks.train_once, flags(models), rollout)[0]
    rough = two_ranks.run(ranks.train_once, flags(models, bf16=True, **changes), rollout)[0]
    assert rough.weights["model.norm.weight"].dtype == torch.bfloat16
    assert rough.metrics[0]["loss"] == pytest.approx(exact.metrics[0]["loss"], abs=0.02)
    assert rough.metrics[0]["grad_norm"] == pytest.approx(exact.metrics[0]["grad_norm"], rel=0.05)
    assert relative_error(rough.weights, {name: value.double() for name, value in exact.weights.items()}) < 0.01
