"""Discounted returns against the recurrence itself."""

from __future__ import annotations

import pytest
import torch

from slimrl.algorithms.returns import discounted_returns, reward_at_last_token


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_returns_follow_the_recurrence_within_each_sample(gamma: float):
    torch.manual_seed(0)
    lengths = torch.tensor([5, 1, 0, 130])
    rewards = torch.randn(int(lengths.sum()))
    expected, end = [], rewards.tolist()
    for length in lengths.tolist():
        sample, end = end[:length], end[length:]
        running, returns = 0.0, []
        for reward in reversed(sample):
            running = reward + gamma * running
            returns.append(running)
        expected += reversed(returns)
    torch.testing.assert_close(
        discounted_returns(rewards, lengths, gamma), torch.tensor(expected), rtol=1e-6, atol=1e-6
    )


def test_empty_input_gives_empty_returns():
    assert discounted_returns(torch.zeros(0), torch.tensor([0]), 1.0).numel() == 0


def test_mismatched_lengths_are_rejected():
    with pytest.raises(ValueError, match="add up to 3 tokens and there are 2"):
        discounted_returns(torch.zeros(2), torch.tensor([3]), 1.0)


def test_reward_is_placed_at_the_last_trained_token():
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    placed = reward_at_last_token(torch.tensor([2.0, 3.0, 5.0]), mask, torch.tensor([3, 2, 1]))
    # the second sample is fully masked: its reward is not used
    assert placed.tolist() == [0.0, 2.0, 0.0, 0.0, 0.0, 5.0]


def test_reward_may_be_at_the_first_token():
    placed = reward_at_last_token(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 0.0, 1.0]), torch.tensor([2, 1]))
    assert placed.tolist() == [2.0, 0.0, 3.0]
