"""Importance weights, sequence ratios and masked sequences, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from slimrl.algorithms.losses import cispo_loss
from slimrl.algorithms.off_policy import importance_weights, off_policy_sequence_mask, sequence_log_ratio


def test_weights_are_the_ratio_of_probabilities_within_bounds():
    train = torch.log(torch.tensor([0.5, 0.9, 0.1])).requires_grad_()
    rollout = torch.log(torch.tensor([0.25, 0.3, 0.4]))
    weights, unbounded = importance_weights(train - rollout, low=0.5, high=2.5)
    torch.testing.assert_close(unbounded, torch.tensor([2.0, 3.0, 0.25]))
    torch.testing.assert_close(weights, torch.tensor([2.0, 2.5, 0.5]))
    assert not weights.requires_grad


def test_overflowing_importance_weight_is_finite_and_bounded():
    train, rollout = torch.tensor([0.0, -1000.0]), torch.tensor([-1000.0, 0.0])
    weights, unbounded = importance_weights(train - rollout, low=0.5, high=2.5)
    assert weights.tolist() == [2.5, 0.5]
    assert unbounded.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-6)


@pytest.mark.parametrize(("low", "high"), [(0.0, 2.0), (0.5, 1.0), (2.0, 3.0)])
def test_each_bound_works_alone(low, high):
    ratios = [0.25, 0.5, 1.0, 2.0, 4.0]
    train = torch.log(torch.tensor(ratios))
    weights, _ = importance_weights(train, low=low, high=high)
    assert weights.tolist() == pytest.approx([min(max(ratio, low), high) for ratio in ratios], rel=1e-6)


def test_sequence_log_ratio_is_the_mean_over_its_trained_tokens():
    log_probs = torch.tensor([-1.0, -9.0, -2.0, -3.0, -7.0]).requires_grad_()
    old = torch.tensor([-1.5, -1.0, -1.0, -3.5, -1.0])
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    ratios = sequence_log_ratio(log_probs, old, mask, torch.tensor([3, 1, 1]))
    assert ratios.tolist() == pytest.approx([(0.5 - 1.0) / 2] * 3 + [0.5, 0.0])
    ratios[0].backward()
    assert log_probs.grad.tolist() == [0.5, 0.0, 0.5, 0.0, 0.0]


def test_only_drifted_samples_with_negative_advantage_are_masked():
    old = torch.zeros(4)
    log_probs = torch.tensor([-0.3, -0.1, -0.2, 0.2])  # drifts of 0.2, 0.2 and -0.2
    advantages = torch.tensor([-1.0, -1.0, 1.0, -1.0])
    left_out = off_policy_sequence_mask(log_probs, old, advantages, torch.ones(4), torch.tensor([2, 1, 1]), delta=0.15)
    assert left_out.tolist() == [1.0, 1.0, 0.0, 0.0]
    wider = off_policy_sequence_mask(log_probs, old, advantages, torch.ones(4), torch.tensor([2, 1, 1]), delta=0.25)
    assert wider.tolist() == [0.0] * 4


def test_sample_with_zero_advantage_or_exactly_at_the_bound_is_kept():
    log_probs = torch.tensor([-0.5, -0.25, -0.5])  # exact in binary
    advantages = torch.tensor([0.0, -1.0, -1.0])
    lengths = torch.tensor([1, 1, 1])
    left_out = off_policy_sequence_mask(log_probs, torch.zeros(3), advantages, torch.ones(3), lengths, delta=0.25)
    assert left_out.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"), [(1.1, 2.0, 1.1), (2.0, 2.0, 1.28), (0.5, -1.0, 0.8), (2.0, -1.0, 1.28)]
)
def test_cispo_clips_the_token_weight_and_keeps_its_gradient(ratio: float, advantage: float, weight: float):
    old = torch.tensor([-1.0])
    log_probs = (old + math.log(ratio)).requires_grad_()
    result = cispo_loss(log_probs, old, torch.tensor([advantage]), eps_clip=0.2, eps_clip_high=0.28)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(-weight * advantage * log_probs.item(), rel=1e-6)
    assert log_probs.grad.item() == pytest.approx(-weight * advantage, rel=1e-6)
    assert result.clipped.item() == float(weight != ratio)
