"""Preference losses against their papers' formulas, written again with Python floats, and derivatives by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slimrl.algorithms.preference_losses import (
    PREFERENCE_LOSSES,
    PreferenceConfig,
    ResponseScores,
    label_losses,
    means_by_label,
    mismatched_kl,
    pair_losses,
)

# per pair: sum of the policy's log-probabilities, of the reference's, number of tokens; chosen, then rejected
PAIRS = (
    ((-12.5, -14.0, 7), (-9.25, -8.5, 4)),
    ((-30.0, -21.0, 11), (-41.0, -52.0, 20)),
    ((-0.4, -0.3, 1), (-2.0, -6.5, 3)),
    ((-8.0, -8.0, 5), (-16.0, -16.0, 5)),
)
Side = tuple[float, float, int]
KTO = PreferenceConfig("kto", 0.1)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_odds(mean: float) -> float:
    probability = math.exp(mean)
    return math.log(probability / (1 - probability))


def gap(side: Side) -> float:
    return side[0] - side[1]


def mean_gap(side: Side) -> float:
    return gap(side) / side[2]


def mean(side: Side) -> float:
    return side[0] / side[2]


# (loss, its derivative by the two sums of log-probabilities, the two rewards) of a pair
Expected = tuple[float, float, float, float, float]


def dpo(chosen: Side, rejected: Side, *, beta: float, wrong: float = 0.0) -> Expected:
    margin = beta * (gap(chosen) - gap(rejected))
    loss = -(1 - wrong) * math.log(sigmoid(margin)) - wrong * math.log(sigmoid(-margin))
    slope = beta * (sigmoid(margin) - (1 - wrong))
    return loss, slope, -slope, beta * gap(chosen), beta * gap(rejected)


def without_reference(chosen: Side, rejected: Side, *, beta: float) -> Expected:
    return dpo((chosen[0], 0.0, chosen[2]), (rejected[0], 0.0, rejected[2]), beta=beta)


def dpo_norm(chosen: Side, rejected: Side, *, beta: float) -> Expected:
    margin = beta * (mean_gap(chosen) - mean_gap(rejected))
    slope = beta * (sigmoid(margin) - 1)
    rewards = beta * mean_gap(chosen), beta * mean_gap(rejected)
    return -math.log(sigmoid(margin)), slope / chosen[2], -slope / rejected[2], *rewards


def robust(chosen: Side, rejected: Side, *, beta: float, wrong: float) -> Expected:
    right, *_ = dpo(chosen, rejected, beta=beta)
    flipped, *_ = dpo(rejected, chosen, beta=beta)
    margin = beta * (gap(chosen) - gap(rejected))
    slope = beta * (-(1 - wrong) * sigmoid(-margin) - wrong * sigmoid(margin)) / (1 - 2 * wrong)
    loss = ((1 - wrong) * right - wrong * flipped) / (1 - 2 * wrong)
    return loss, slope, -slope, beta * gap(chosen), beta * gap(rejected)


def hinge(chosen: Side, rejected: Side, *, beta: float) -> Expected:
    margin = beta * (gap(chosen) - gap(rejected))
    slope = -beta if margin < 1 else 0.0
    return max(0.0, 1 - margin), slope, -slope, beta * gap(chosen), beta * gap(rejected)


def ipo(chosen: Side, rejected: Side, *, beta: float) -> Expected:
    distance = mean_gap(chosen) - mean_gap(rejected) - 1 / (2 * beta)
    slopes = 2 * distance / chosen[2], -2 * distance / rejected[2]
    return distance**2, *slopes, beta * mean_gap(chosen), beta * mean_gap(rejected)


def simpo(chosen: Side, rejected: Side, *, beta: float, gamma: float) -> Expected:
    distance = beta * mean(chosen) - beta * mean(rejected) - gamma
    slope = beta * (sigmoid(distance) - 1)
    rewards = beta * mean(chosen), beta * mean(rejected)
    return -math.log(sigmoid(distance)), slope / chosen[2], -slope / rejected[2], *rewards


def orpo(chosen: Side, rejected: Side, *, beta: float) -> Expected:
    ratio = log_odds(mean(chosen)) - log_odds(mean(rejected))
    loss = -mean(chosen) - beta * math.log(sigmoid(ratio))
    # the derivative of log odds by the mean log-probability is 1 / (1 - P)
    slopes = [beta * (sigmoid(ratio) - 1) / (1 - math.exp(mean(side))) for side in (chosen, rejected)]
    gradients = (slopes[0] - 1) / chosen[2], -slopes[1] / rejected[2]
    return loss, *gradients, beta * mean(chosen), beta * mean(rejected)


CASES: dict[str, tuple[Callable[..., Expected], PreferenceConfig, dict[str, Any]]] = {
    "sigmoid": (dpo, PreferenceConfig("sigmoid", 0.1), {"beta": 0.1}),
    "cDPO": (dpo, PreferenceConfig("sigmoid", 0.3, label_smoothing=0.2), {"beta": 0.3, "wrong": 0.2}),
    "no reference": (without_reference, PreferenceConfig("sigmoid", 0.1, reference_free=True), {"beta": 0.1}),
    "sigmoid_norm": (dpo_norm, PreferenceConfig("sigmoid_norm", 5.0), {"beta": 5.0}),
    "robust": (robust, PreferenceConfig("robust", 0.1, label_smoothing=0.3), {"beta": 0.1, "wrong": 0.3}),
    "hinge": (hinge, PreferenceConfig("hinge", 0.2), {"beta": 0.2}),
    "ipo": (ipo, PreferenceConfig("ipo", 0.1), {"beta": 0.1}),
    "simpo": (simpo, PreferenceConfig("simpo", 2.0, gamma=1.2), {"beta": 2.0, "gamma": 1.2}),
    "orpo": (orpo, PreferenceConfig("orpo", 0.25), {"beta": 0.25}),
}


def scores(sides: list[Side], *, reference: bool = True) -> ResponseScores:
    sums, references, tokens = (torch.tensor(column, dtype=torch.float64) for column in zip(*sides, strict=True))
    return ResponseScores(sums.requires_grad_(), tokens, references if reference else None)


def test_every_loss_of_the_table_has_a_case():
    tested = {settings.name for _, settings, _ in CASES.values()} | {"kto", "apo_zero_unpaired"}
    assert tested == set(PREFERENCE_LOSSES)


@pytest.mark.parametrize(("formula", "settings", "values"), CASES.values(), ids=CASES)
def test_loss_and_gradient_are_those_of_the_paper(formula, settings, values):
    chosen, rejected = (scores([pair[place] for pair in PAIRS]) for place in range(2))
    found = pair_losses(chosen, rejected, settings)
    gradients = torch.autograd.grad(found.loss.sum(), (chosen.log_probs, rejected.log_probs))
    columns = (found.loss, *gradients, found.chosen_reward, found.rejected_reward)
    expected = [formula(*pair, **values) for pair in PAIRS]
    for column, wanted in zip(columns, zip(*expected, strict=True), strict=True):
        assert column.tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-14)
    assert found.margin.tolist() == pytest.approx([row[3] - row[4] for row in expected], rel=1e-12, abs=1e-14)


def test_likelihood_of_the_chosen_response_is_added_with_its_weight():
    chosen, rejected = (scores([pair[place] for pair in PAIRS]) for place in range(2))
    plain, with_likelihood = (
        pair_losses(chosen, rejected, PreferenceConfig("hinge", 0.1, nll_coef=weight)).loss for weight in (0.0, 0.5)
    )
    expected = [-0.5 * mean(pair[0]) for pair in PAIRS]
    assert (with_likelihood - plain).tolist() == pytest.approx(expected, rel=1e-12)


def test_gradient_is_finite_where_probabilities_round_to_one_or_zero():
    sides = [(0.0, 0.0, 3), (-5000.0, -1.0, 2)]
    for settings in (entry[1] for entry in CASES.values()):
        chosen, rejected = scores(sides), scores(sides[::-1])
        found = pair_losses(chosen, rejected, settings)
        gradients = torch.autograd.grad(found.loss.sum(), (chosen.log_probs, rejected.log_probs))
        assert all(torch.isfinite(values).all() for values in (found.loss, *gradients)), settings.name


@pytest.mark.parametrize("name", [row.name for row in PREFERENCE_LOSSES.values() if row.has_reference and row.compares])
def test_missing_reference_is_an_error_unless_the_loss_needs_none(name):
    chosen, rejected = (scores([pair[place] for pair in PAIRS], reference=False) for place in range(2))
    with pytest.raises(ValueError, match="compares with a reference model"):
        pair_losses(chosen, rejected, PreferenceConfig(name, 0.1))
    assert pair_losses(chosen, rejected, PreferenceConfig(name, 0.1, reference_free=True)).loss.shape == (4,)


def kto(side: Side, *, desirable: bool, kl: float, beta: float, weight: float) -> tuple[float, float, float]:
    """Loss, derivative and reward of a response."""
    distance = beta * (gap(side) - kl)
    value = sigmoid(distance if desirable else -distance)
    slope = beta * sigmoid(distance) * sigmoid(-distance) * (-1 if desirable else 1)
    return weight * (1 - value), weight * slope, beta * gap(side)


@pytest.mark.parametrize("kl", [0.0, 1.75])
def test_loss_of_labelled_responses_is_that_of_kto(kl):
    sides = [side for pair in PAIRS for side in pair]
    labels = [True, False, False, True, True, True, False, False]
    settings = PreferenceConfig("kto", 0.3, desirable_weight=1.5, undesirable_weight=0.25)
    responses = scores(sides)
    loss, reward = label_losses(responses, torch.tensor(labels), torch.tensor(kl, dtype=torch.float64), settings)
    (gradient,) = torch.autograd.grad(loss.sum(), responses.log_probs)
    expected = [
        kto(side, desirable=label, kl=kl, beta=0.3, weight=1.5 if label else 0.25)
        for side, label in zip(sides, labels, strict=True)
    ]
    for column, wanted in zip((loss, gradient, reward), zip(*expected, strict=True), strict=True):
        assert column.tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-14)


def test_kl_of_mismatched_responses_is_their_mean_and_never_negative():
    total = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    found = mismatched_kl(total, torch.tensor(4.0, dtype=torch.float64))
    assert float(found) == 1.25 and not found.requires_grad
    assert float(mismatched_kl(-total, torch.tensor(4.0))) == 0.0


def test_labelled_responses_need_a_reference():
    with pytest.raises(ValueError, match="compares with a reference model"):
        label_losses(scores([PAIRS[0][0]], reference=False), torch.tensor([True]), torch.zeros(()), KTO)


def test_metrics_of_a_kind_are_means_over_its_responses():
    sums = {"loss": 0.5, "desirable_share": 0.25, "chosen_reward": 0.5, "rejected_reward": -1.5, "kto_kl": 2.0}
    expected = sums | {"chosen_reward": 2.0, "rejected_reward": -2.0, "reward_margin": 4.0}
    assert means_by_label(sums) == expected
    only = means_by_label({"desirable_share": 1.0, "chosen_reward": 0.5, "rejected_reward": 0.0})
    assert only == {"desirable_share": 1.0, "chosen_reward": 0.5}
