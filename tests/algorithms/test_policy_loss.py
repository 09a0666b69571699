"""The clipped policy loss token by token, against hand computation."""

import math

import pytest
import torch

from slimrl.algorithms.losses import clipped_policy_loss

OLD = torch.tensor([-1.0])


def loss_at(ratio: float, advantage: float, **clip: float | None):
    options = {"eps_clip": 0.2, "eps_clip_high": 0.28, **clip}
    log_probs = (OLD + math.log(ratio)).requires_grad_()
    result = clipped_policy_loss(log_probs, OLD, torch.tensor([advantage]), **options)
    result.loss.sum().backward()
    return result, log_probs.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, 0.0),
        (1.1, 2.0, -2.2, 0.0),  # inside the range
        (1.5, 2.0, -2.56, 1.0),  # above 1 + 0.28 with positive advantage: bounded
        (1.5, -2.0, 3.0, 0.0),  # above with negative advantage: the full push back
        (0.5, 2.0, -1.0, 0.0),  # below with positive advantage: the full push up
        (0.5, -2.0, 1.6, 1.0),  # below 1 - 0.2 with negative advantage: bounded
        (5.0, -2.0, 10.0, 0.0),  # no bound without the dual clip
    ],
)
def test_loss_is_the_maximum_of_clipped_and_unclipped_with_separate_bounds(ratio, advantage, loss, clipped):
    result, gradient = loss_at(ratio, advantage)
    assert result.loss.item() == pytest.approx(loss, rel=1e-6)
    assert result.clipped.item() == clipped
    assert result.ratio.item() == pytest.approx(ratio, rel=1e-6)
    # d loss / d log_prob = -ratio * advantage, and nothing where a clip decides
    assert gradient == pytest.approx(0.0 if clipped else -ratio * advantage, rel=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (5.0, -2.0, 6.0, 1.0),  # at most 3 * 2
        (2.5, -2.0, 5.0, 0.0),  # below the bound
        (5.0, -0.5, 1.5, 1.0),  # however small the advantage
        (5.0, 2.0, -2.56, 1.0),  # positive advantages: the ordinary clip
        (0.5, -2.0, 1.6, 1.0),
    ],
)
def test_dual_clip_bounds_the_loss_of_negative_advantages(ratio, advantage, loss, clipped):
    result, gradient = loss_at(ratio, advantage, eps_clip_c=3.0)
    assert result.loss.item() == pytest.approx(loss, rel=1e-6)
    assert result.clipped.item() == clipped
    assert gradient == pytest.approx(0.0 if clipped else -ratio * advantage, rel=1e-6)


def test_first_step_has_ratio_one_no_clipping_and_the_policy_gradient():
    log_probs = torch.tensor([-1.0, -2.5], requires_grad=True)
    result = clipped_policy_loss(
        log_probs, log_probs.detach(), torch.tensor([0.7, -0.3]), eps_clip=0.2, eps_clip_high=0.28
    )
    result.loss.sum().backward()
    assert log_probs.grad.tolist() == pytest.approx([-0.7, 0.3])
    assert result.ratio.tolist() == [1.0, 1.0]
    assert result.clipped.tolist() == [0.0, 0.0]
    assert not result.ratio.requires_grad


def test_extreme_ratio_gives_a_finite_loss_and_gradient():
    log_probs = torch.tensor([0.0, 0.0], requires_grad=True)
    result = clipped_policy_loss(
        log_probs, torch.tensor([-500.0, -500.0]), torch.tensor([1.0, -1.0]), eps_clip=0.2, eps_clip_high=0.2
    )
    result.loss.sum().backward()
    assert torch.isfinite(result.loss).all()
    assert torch.isfinite(log_probs.grad).all()


def test_no_gradient_reaches_old_log_probs_or_advantages():
    old = torch.tensor([-1.0], requires_grad=True)
    advantages = torch.tensor([1.0], requires_grad=True)
    log_probs = torch.tensor([-1.05], requires_grad=True)
    clipped_policy_loss(log_probs, old, advantages, eps_clip=0.2, eps_clip_high=0.2).loss.sum().backward()
    assert old.grad is None
    assert advantages.grad is None


def test_dual_clip_bound_of_one_or_less_is_rejected():
    with pytest.raises(ValueError, match="--eps-clip-c is 1.0 and must be above 1"):
        loss_at(1.0, 1.0, eps_clip_c=1.0)


def test_dual_clip_bound_just_above_one_is_accepted():
    result, _ = loss_at(1.5, -2.0, eps_clip_c=1.1)
    assert result.loss.item() == pytest.approx(2.2, rel=1e-6)  # 1.1 x 2, not 1.5 x 2
