"""The likelihood loss on samples with a high reward: VAPO's mean over their tokens, in every split and layout."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.training.loss.policy_loss import PolicyLossConfig, PolicyLossInputs, policy_loss_sums
from tests import accuracy
from tests.megatron import layouts, ranks, reference
from tests.megatron.layouts import Layout
from tests.megatron.test_corrected_loss import LAYOUTS

COEF = 0.1  # VAPO's
LENGTHS = (3, 2, 4)
SETTINGS = PolicyLossConfig(
    eps_clip=0.2,
    eps_clip_high=0.2,
    eps_clip_c=None,
    entropy_coef=0.0,
    kl_loss_coef=0.0,
    kl_loss_type="k1",
    per_token=False,
    positive_coef=COEF,
)


def three_samples(weights: torch.Tensor) -> PolicyLossInputs:
    """The first and the third are positive; a token of the first is masked."""
    log_probs = torch.linspace(-2.0, -0.5, 9, dtype=torch.float64)
    return PolicyLossInputs(
        log_probs=log_probs.clone().requires_grad_(),
        entropy=torch.zeros(9, dtype=torch.float64),
        old_log_probs=log_probs,
        train_log_probs=log_probs,
        rollout_log_probs=log_probs,
        ref_log_probs=None,
        advantages=torch.tensor([1.0] * 3 + [-1.0] * 2 + [0.5] * 4, dtype=torch.float64),
        loss_mask=torch.tensor([1.0, 0.0, 1.0] + [1.0] * 6, dtype=torch.float64),
        response_lengths=torch.tensor(LENGTHS),
        positive_weights=weights,
    )


@pytest.mark.parametrize("per_token", [False, True], ids=["per sample", "per token"])
def test_positive_tokens_add_their_mean_negative_log_likelihood(per_token: bool):
    count = 8 if per_token else 3  # trained tokens, samples
    weights = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64) * count / 6
    settings = dataclasses.replace(SETTINGS, per_token=per_token)
    plain = three_samples(weights)
    without = policy_loss_sums(plain, dataclasses.replace(settings, positive_coef=0.0))
    without.loss.backward()
    inputs = three_samples(weights)
    sums = policy_loss_sums(inputs, settings)
    sums.loss.backward()
    chosen = [float(value) for token, value in enumerate(inputs.log_probs) if token in (0, 2, 5, 6, 7, 8)]
    mean = -math.fsum(chosen) / 6
    assert float(sums.weighted["positive_example_loss"]) / count == pytest.approx(mean, rel=1e-12)
    assert float((sums.loss - without.loss).detach()) / count == pytest.approx(COEF * mean, rel=1e-12)
    assert float(sums.weighted["loss"]) == pytest.approx(float(sums.loss.detach()), rel=1e-12)
    expected = -COEF / 6 * (weights > 0).double()
    torch.testing.assert_close((inputs.log_probs.grad - plain.log_probs.grad) / count, expected, rtol=1e-12, atol=1e-15)
    assert int(sums.count) == count


def test_loss_without_the_flag_has_neither_term_nor_metric():
    settings = dataclasses.replace(SETTINGS, positive_coef=0.0)
    assert "positive_example_loss" not in policy_loss_sums(three_samples(torch.ones(9)), settings).weighted
    assert "positive_example_loss" not in settings.metric_names.weighted
    assert "positive_example_loss" in SETTINGS.metric_names.weighted


def by_hand(models: layouts.Models, rollout: RolloutBatch, rows: range) -> float:
    """The mean negative log-likelihood of the trained tokens of the positive samples, by transformers in float64."""
    policy = reference.load_model(models.folder("dense", Layout(1, {}).layers, "policy"))
    losses: list[float] = []
    with torch.no_grad():
        for row, sample in enumerate(reference._split(rollout)):
            if row in rows and rollout.raw_rewards[row] >= 0.5:
                values = reference._log_probs(policy, sample, layouts.SETTINGS.temperature)[0]
                losses += (-values[sample["mask"] > 0]).tolist()
    return math.fsum(losses) / len(losses)


@pytest.mark.slow
@pytest.mark.parametrize("per_token", [False, True], ids=["per sample", "per token"])
def test_every_layout_adds_the_mean_over_the_positive_tokens_of_the_step(
    per_token: bool, one_rank: Any, two_ranks: Any, tmp_path: Any
):
    models = layouts.Models(tmp_path)
    settings = dataclasses.replace(layouts.SETTINGS, per_token=per_token)
    count = len(models.rollout)
    rewards = torch.tensor([float(row % 3 == 0) for row in range(count)])
    rollout = dataclasses.replace(models.rollout, raw_rewards=rewards)
    flags = {"positive_example_loss_coef": COEF, "positive_example_reward": 0.5}

    def result(pool: Any, layout: Layout, **more: Any) -> ranks.StepResult:
        args = dataclasses.replace(models.args(layout, "dense", settings), **(flags | more))
        return layouts.train(pool, args, rollout)

    single = result(one_rank, Layout(1, {}))
    plain = result(one_rank, Layout(1, {}), positive_example_loss_coef=0.0)
    first, mean = single.metrics[0], by_hand(models, rollout, range(count // settings.steps))
    assert first["positive_example_loss"] == pytest.approx(mean, rel=1e-5)
    assert first["loss"] - plain.metrics[0]["loss"] == pytest.approx(COEF * mean, rel=1e-4)
    assert single.metrics[1]["positive_example_loss"] != first["positive_example_loss"]
    for layout in LAYOUTS.values() if not per_token else [LAYOUTS["CP2, packed"]]:
        found = result(two_ranks, layout)
        for step, expected in zip(found.metrics, single.metrics, strict=True):
            step = {key: value for key, value in step.items() if "memory_" not in key}
            accuracy.near("loss", step, {key: expected[key] for key in step}, rel=1e-4, abs=1e-6)
        accuracy.below("weights", layouts.relative_error(found.weights, single.weights), 1e-5)
