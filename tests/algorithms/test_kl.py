"""KL estimators against the values in closed form, and against the true divergence of two distributions."""

import pytest
import torch

from slimrl.algorithms.losses import kl_estimate, next_entropy_coef, next_kl_coef

LOG_PROBS = torch.tensor([-1.0, -2.0])
REF_LOG_PROBS = torch.tensor([-1.2, -1.5])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [0.2, -0.5]),
        ("k2", [0.02, 0.125]),
        ("k3", [0.018731, 0.148721]),  # exp(-0.2) - 1 + 0.2 and exp(0.5) - 1 - 0.5
        ("low_var_kl", [0.018731, 0.148721]),
    ],
)
def test_estimators_match_the_closed_form(kind, expected):
    estimate = kl_estimate(LOG_PROBS, REF_LOG_PROBS, kind)
    assert estimate.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind):
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    expectation = (policy * kl_estimate(policy.log(), reference.log(), kind)).sum()
    true_kl = (policy * (policy / reference).log()).sum()
    assert expectation.item() == pytest.approx(true_kl.item(), rel=1e-12)


def test_low_var_kl_is_clamped_and_keeps_a_finite_gradient_when_k3_overflows():
    log_probs = torch.tensor([-200.0, -20.0, -0.1], requires_grad=True)
    reference = torch.tensor([-0.1, -0.1, -200.0])
    estimate = kl_estimate(log_probs, reference, "low_var_kl")
    estimate.sum().backward()
    assert estimate.tolist() == [10.0, 10.0, 10.0]
    assert log_probs.grad.tolist() == [0.0, 0.0, 0.0]
    assert kl_estimate(log_probs, reference, "k3")[0].item() == float("inf")


def test_equal_log_probs_give_exactly_zero():
    for kind in ("k1", "k2", "k3", "low_var_kl"):
        assert kl_estimate(LOG_PROBS, LOG_PROBS.clone(), kind).tolist() == [0.0, 0.0]


def test_k3_keeps_its_precision_near_zero():
    # exp(-d) - 1 + d = d**2 / 2 - d**3 / 6 + ...; computed as exp and then - 1, float32 gives 0 or 1.2e-7 here.
    estimate = kl_estimate(torch.tensor([1e-3]), torch.tensor([0.0]), "k3")
    assert estimate.item() == pytest.approx(5e-7, rel=0.1)


def test_unknown_estimator_is_rejected_with_the_choices():
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'.*k1, k2, k3, low_var_kl"):
        kl_estimate(LOG_PROBS, REF_LOG_PROBS, "k4")


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(6.0, 1.0), (6.6, 1 + 0.1 * 0.1), (5.4, 1 - 0.1 * 0.1), (60.0, 1.02), (0.0, 0.98), (-3.0, 0.98), (7.2, 1.02)],
)
def test_adaptive_coefficient_moves_by_the_bounded_relative_error(kl: float, factor: float):
    """Ziegler et al. 2019, section 2.2, with their gain of 0.1: 1,000 samples of a horizon of 10,000."""
    assert next_kl_coef(0.2, kl, target=6.0, samples=1000, horizon=10_000) == pytest.approx(0.2 * factor, rel=1e-12)


@pytest.mark.parametrize(
    ("coef", "entropy", "expected"),
    [(0.0, 0.1, 0.005), (0.02, 0.1, 0.025), (0.02, 0.3, 0.015), (0.02, 0.2, 0.02), (0.003, 0.3, 0.0), (0.0, 0.3, 0.0)],
)
def test_entropy_coefficient_moves_by_a_step_and_stays_at_least_0(coef: float, entropy: float, expected: float):
    assert next_entropy_coef(coef, entropy, target=0.2, delta=0.005) == pytest.approx(expected, abs=1e-15)
