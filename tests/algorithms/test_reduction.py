"""Reductions: hand computation, and independence from how a batch is split."""

import pytest
import torch

from slimrl.algorithms.losses import masked_mean_per_sample_sum, masked_sum, sample_mean_weights

VALUES = torch.tensor([1.0, 2.0, 3.0, 10.0, 20.0, 5.0])
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
LENGTHS = torch.tensor([3, 2, 0, 1])


def test_masked_sum_adds_the_unmasked_values():
    assert masked_sum(VALUES, MASK).item() == 34.0


def test_per_sample_sum_adds_the_masked_mean_of_each_sample():
    # (1 + 3) / 2 + (10 + 20) / 2 + nothing for an empty sample + nothing for a fully masked one
    assert masked_mean_per_sample_sum(VALUES, MASK, LENGTHS).item() == 17.0


def test_token_gradient_is_one_over_the_trained_tokens_of_its_sample():
    values = VALUES.clone().requires_grad_()
    masked_mean_per_sample_sum(values, MASK, LENGTHS).backward()
    assert values.grad.tolist() == [0.5, 0.0, 0.5, 0.5, 0.5, 0.0]


def test_masked_values_may_be_nan_or_infinite():
    values = torch.tensor([1.0, float("nan"), 3.0, 10.0, 20.0, float("inf")], requires_grad=True)
    total = masked_mean_per_sample_sum(values, MASK, LENGTHS)
    total.backward()
    assert total.item() == 17.0
    assert torch.isfinite(values.grad).all()
    assert masked_sum(values, MASK).item() == 34.0


def test_splitting_the_batch_does_not_change_the_sum():
    torch.manual_seed(0)
    lengths = torch.tensor([4, 1, 7, 3])
    values, mask = torch.randn(15, dtype=torch.float64), (torch.rand(15) < 0.6).double()
    whole = masked_mean_per_sample_sum(values, mask, lengths)
    parts = [
        masked_mean_per_sample_sum(values[:5], mask[:5], lengths[:2]),
        masked_mean_per_sample_sum(values[5:], mask[5:], lengths[2:]),
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-12)


def test_mismatched_lengths_are_rejected():
    with pytest.raises(ValueError, match="add up to 4 tokens and the mask has 6"):
        sample_mean_weights(MASK, torch.tensor([3, 1]))
