"""The sums of the policy loss: correct for one micro-batch, and independent of the split of the batch."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from slimrl.algorithms.estimators import Objective
from slimrl.algorithms.off_policy import ImportanceWeighting, Rejection
from slimrl.megatron.training.loss.loss_sums import LossSums
from slimrl.megatron.training.loss.policy_loss import PolicyLossConfig, PolicyLossInputs, policy_loss_sums
from slimrl.observability.metrics import metric_of
from slimrl.observability.metrics.training_rows import TRAIN

SETTINGS = PolicyLossConfig(
    eps_clip=0.2,
    eps_clip_high=0.3,
    eps_clip_c=None,
    entropy_coef=0.5,
    kl_loss_coef=2.0,
    kl_loss_type="k2",
    per_token=False,
)


def two_samples() -> PolicyLossInputs:
    """Three tokens (the second masked) and one; ratios 1, any, 1.5 (clipped at 1.3) and 1."""
    old = torch.tensor([-1.0, -2.0, -3.0, -1.5])
    return PolicyLossInputs(
        log_probs=old + torch.tensor([0.0, 7.0, math.log(1.5), 0.0]),
        entropy=torch.tensor([0.4, 9.0, 0.8, 1.0]),
        old_log_probs=old,
        train_log_probs=old,
        rollout_log_probs=old + torch.tensor([0.01, 5.0, -0.03, 0.02]),
        ref_log_probs=old,
        advantages=torch.tensor([2.0, 2.0, 2.0, -1.0]),
        loss_mask=torch.tensor([1.0, 0.0, 1.0, 1.0]),
        response_lengths=torch.tensor([3, 1]),
    )


def numbers(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


KL = math.log(1.5) ** 2 / 2
TOKENS = [-2.0 - 0.2, -2.0 * 1.3 - 0.4 + 2 * KL, 1.0 - 0.5]  # trained tokens, in order


def test_per_sample_loss_is_the_sum_of_sample_means():
    sums = policy_loss_sums(two_samples(), SETTINGS)
    assert int(sums.count) == 2
    assert float(sums.loss) == pytest.approx((TOKENS[0] + TOKENS[1]) / 2 + TOKENS[2], rel=1e-6)
    expected = {
        "loss": (TOKENS[0] + TOKENS[1]) / 2 + TOKENS[2],
        "pg_loss": (-2.0 - 2.6) / 2 + 1.0,
        "entropy_loss": (0.4 + 0.8) / 2 + 1.0,
        "pg_clipfrac": 0.5,
        "ppo_kl": -math.log(1.5) / 2,
        "kl_loss": KL / 2,
        "ratio_mean": (1 + 1.5) / 2 + 1,
    }
    assert numbers(sums.weighted) == pytest.approx(expected, rel=1e-6)


def test_per_token_loss_is_the_sum_over_trained_tokens():
    sums = policy_loss_sums(two_samples(), dataclasses.replace(SETTINGS, per_token=True))
    assert int(sums.count) == 3
    assert float(sums.loss) == pytest.approx(sum(TOKENS), rel=1e-6)


def test_masked_tokens_do_not_affect_sums_or_maxima():
    sums = policy_loss_sums(two_samples(), SETTINGS)
    assert float(sums.trained_tokens) == 3.0
    mismatch = "train_rollout_logprob_abs_diff"
    assert numbers(sums.by_token) == pytest.approx({f"{mismatch}_mean": 0.01 + 0.03 + 0.02}, rel=1e-4)
    assert numbers(sums.maxima) == pytest.approx({"ratio_max_abs_diff": 0.5, f"{mismatch}_max": 0.03}, rel=1e-4)


def test_masked_token_with_an_invalid_value_keeps_loss_and_gradient_finite():
    inputs = two_samples()
    log_probs = inputs.log_probs.clone()
    log_probs[1] = float("-inf")
    log_probs.requires_grad_()
    sums = policy_loss_sums(dataclasses.replace(inputs, log_probs=log_probs), SETTINGS)
    sums.loss.backward()
    assert torch.isfinite(sums.loss)
    assert float(log_probs.grad[1]) == 0.0


def test_fully_masked_sample_is_counted_and_adds_zero():
    inputs = dataclasses.replace(two_samples(), loss_mask=torch.tensor([1.0, 0.0, 1.0, 0.0]))
    sums = policy_loss_sums(inputs, SETTINGS)
    assert int(sums.count) == 2
    assert float(sums.loss) == pytest.approx((TOKENS[0] + TOKENS[1]) / 2, rel=1e-6)


@pytest.mark.parametrize("per_token", [False, True])
def test_splitting_the_batch_between_samples_changes_nothing(per_token: bool):
    settings = dataclasses.replace(SETTINGS, per_token=per_token)
    inputs = two_samples()

    def part(tokens: slice, samples: slice) -> LossSums:
        names = [field.name for field in dataclasses.fields(inputs)]
        cut = {name: getattr(inputs, name)[tokens] for name in names[: names.index("response_lengths")]}
        return policy_loss_sums(PolicyLossInputs(**cut, response_lengths=inputs.response_lengths[samples]), settings)

    whole = policy_loss_sums(inputs, settings)
    first, second = part(slice(0, 3), slice(0, 1)), part(slice(3, 4), slice(1, 2))
    torch.testing.assert_close(first.loss + second.loss, whole.loss)
    for name in whole.weighted:
        torch.testing.assert_close(first.weighted[name] + second.weighted[name], whole.weighted[name])
    for name in whole.by_token:
        torch.testing.assert_close(first.by_token[name] + second.by_token[name], whole.by_token[name])
    assert float(first.trained_tokens + second.trained_tokens) == float(whole.trained_tokens)
    assert int(first.count + second.count) == int(whole.count)


def test_kl_is_zero_without_a_reference_and_only_logged_without_a_coefficient():
    inputs = two_samples()
    absent = policy_loss_sums(dataclasses.replace(inputs, ref_log_probs=None), SETTINGS)
    logged = policy_loss_sums(inputs, dataclasses.replace(SETTINGS, kl_loss_coef=0.0))
    assert float(absent.weighted["kl_loss"]) == 0.0
    assert float(logged.weighted["kl_loss"]) == pytest.approx(KL / 2, rel=1e-6)
    torch.testing.assert_close(absent.loss, logged.loss)


def test_only_the_loss_requires_grad():
    inputs = two_samples()
    log_probs = inputs.log_probs.clone().requires_grad_()
    sums = policy_loss_sums(dataclasses.replace(inputs, log_probs=log_probs), SETTINGS)
    assert sums.loss.requires_grad
    metrics = (*sums.weighted.values(), *sums.by_token.values(), *sums.maxima.values(), sums.trained_tokens)
    assert not any(value.requires_grad for value in metrics)


def test_gspo_clips_the_sequence_ratio():
    settings = dataclasses.replace(SETTINGS, objective=Objective.GSPO_CLIP, entropy_coef=0.0, kl_loss_coef=0.0)
    sums = policy_loss_sums(two_samples(), settings)
    # the first sample's trained tokens have log-ratios 0 and log 1.5: their mean is log sqrt(1.5) = log 1.2247
    assert float(sums.loss) == pytest.approx(-2.0 * math.sqrt(1.5) + 1.0, rel=1e-6)
    tight = dataclasses.replace(settings, eps_clip_high=0.1)
    assert float(policy_loss_sums(two_samples(), tight).loss) == pytest.approx(-2.0 * 1.1 + 1.0, rel=1e-6)


def test_importance_weights_multiply_the_policy_loss_and_are_logged():
    settings = dataclasses.replace(
        SETTINGS, entropy_coef=0.0, kl_loss_coef=0.0, weighting=ImportanceWeighting(0.0, 1.01)
    )
    sums = policy_loss_sums(two_samples(), settings)
    weights = [math.exp(-0.01), 1.01, math.exp(-0.02)]  # the second, exp(0.03), is bounded
    expected = (-2.0 * weights[0] - 2.6 * weights[1]) / 2 + weights[2]
    assert float(sums.loss) == pytest.approx(expected, rel=1e-6)
    logged = numbers(sums.weighted)
    assert logged["tis"] == pytest.approx((math.exp(-0.01) + math.exp(0.03)) / 2 + math.exp(-0.02), rel=1e-5)
    assert logged["tis_clipfrac"] == pytest.approx(0.5)


def test_off_policy_sequence_adds_nothing():
    settings = dataclasses.replace(SETTINGS, entropy_coef=0.0, kl_loss_coef=0.0, opsm_delta=0.1)
    inputs = two_samples()
    drifted = dataclasses.replace(inputs, log_probs=inputs.log_probs - torch.tensor([0.0, 0.0, 0.0, 0.2]))
    assert float(policy_loss_sums(drifted, settings).loss) == pytest.approx((-2.0 - 2.6) / 2, rel=1e-6)
    assert float(policy_loss_sums(inputs, settings).loss) == pytest.approx((-2.0 - 2.6) / 2 + 1.0, rel=1e-6)


def test_unbiased_kl_is_multiplied_by_the_ratio():
    inputs = two_samples()
    settings = dataclasses.replace(SETTINGS, unbiased_kl=True)
    logged = numbers(policy_loss_sums(inputs, settings).weighted)
    assert logged["kl_loss"] == pytest.approx(1.5 * KL / 2, rel=1e-6)


@pytest.mark.parametrize(("kind", "slope"), [("k1", 1.0), ("k2", 0.5), ("k3", 1 - math.exp(-0.5))])
def test_unbiased_kl_gradient_includes_the_ratio(kind, slope):
    """d/dx of exp(x - old) k(x) is exp(x - old) (k + k'), with k the estimate at x - ref = 0.5 and k' its slope."""
    estimate = {"k1": 0.5, "k2": 0.125, "k3": math.exp(-0.5) - 1 + 0.5}[kind]
    log_probs = torch.tensor([-1.0], requires_grad=True)
    inputs = PolicyLossInputs(
        log_probs=log_probs,
        entropy=torch.zeros(1),
        old_log_probs=torch.tensor([-1.25]),
        train_log_probs=torch.tensor([-1.25]),
        rollout_log_probs=torch.tensor([-1.25]),
        ref_log_probs=torch.tensor([-1.5]),
        advantages=torch.zeros(1),
        loss_mask=torch.ones(1),
        response_lengths=torch.tensor([1]),
    )
    settings = dataclasses.replace(SETTINGS, entropy_coef=0.0, kl_loss_type=kind, unbiased_kl=True)
    policy_loss_sums(inputs, settings).loss.backward()
    assert log_probs.grad.item() == pytest.approx(2.0 * math.exp(0.25) * (estimate + slope), rel=1e-6)


def test_sft_minimizes_the_negative_log_likelihood_of_trained_tokens():
    settings = dataclasses.replace(SETTINGS, supervised=True)
    sums = policy_loss_sums(two_samples(), settings)
    first, last = 1.0, 3.0 - math.log(1.5)  # the first sample's trained tokens; the second sample's is 1.5
    assert float(sums.loss) == pytest.approx((first + last) / 2 + 1.5, rel=1e-6)
    assert settings.metric_names.weighted == ("loss", "entropy_loss")
    expected = {"loss": (first + last) / 2 + 1.5, "entropy_loss": (0.4 + 0.8) / 2 + 1.0}
    assert numbers(sums.weighted) == pytest.approx(expected, rel=1e-6)
    whole = policy_loss_sums(two_samples(), dataclasses.replace(settings, per_token=True))
    assert (float(whole.loss), int(whole.count)) == (pytest.approx(first + last + 1.5, rel=1e-6), 3)


VARIANTS = {
    "policy": {},
    "GSPO": {"objective": Objective.GSPO_CLIP},
    "CISPO": {"objective": Objective.CISPO, "per_token": True},
    "corrected": {"weighting": ImportanceWeighting(0.0, 2.0), "opsm_delta": 0.1},
    "rejected": {"weighting": ImportanceWeighting(0.5, 2.0, "sequence"), "rejection": Rejection("token", high=2.0)},
    "vetoed": {"rejection": Rejection(veto=0.1)},
    "supervised": {"supervised": True},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_loss_sums_are_in_the_metric_registry(changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    names = policy_loss_sums(two_samples(), settings).names
    assert settings.metric_names == names
    without = dataclasses.replace(two_samples(), ref_log_probs=None)
    assert policy_loss_sums(without, settings).names == names
    rows = {kind: [metric_of(f"train/{name}", TRAIN) for name in found] for kind, found in vars(names).items()}
    assert all(row is not None for found in rows.values() for row in found)
    assert {kind: {row.combine for row in found} for kind, found in rows.items()} == {
        "weighted": {"mean"},
        "by_token": {"mean"},
        "by_sample": {"mean"} if names.by_sample else set(),
        "maxima": {"max"},
    }


def test_custom_loss_has_the_loss_and_the_mismatch_sums():
    settings = dataclasses.replace(SETTINGS, is_custom_loss=True)
    assert settings.metric_names == dataclasses.replace(SETTINGS.metric_names, weighted=("loss",))
