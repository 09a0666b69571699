"""Discounted returns and generalised advantages against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from slimrl.algorithms import returns
from slimrl.algorithms.returns import (
    discounted_returns,
    generalized_advantages,
    length_adaptive_lambda,
    reward_at_last_token,
)


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


def by_definition(rewards: list[float], values: list[float], gamma: float, lambd: float) -> tuple[list[float], ...]:
    """Equation 16 of the paper as it is written: a sum over all later differences, for one sample of trained tokens."""
    following = [*values, 0.0][1:]
    deltas = [r + gamma * after - v for r, after, v in zip(rewards, following, values, strict=True)]
    advantages = [
        math.fsum((gamma * lambd) ** k * delta for k, delta in enumerate(deltas[start:]))
        for start in range(len(deltas))
    ]
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 1.0)])
def test_generalized_advantages_follow_their_definition_over_trained_tokens(gamma: float, lambd: float):
    torch.manual_seed(1)
    lengths = torch.tensor([7, 1, 0, 90, 4])
    mask = (torch.rand(int(lengths.sum())) < 0.7).float()
    mask[-4:] = 0.0  # the last sample is fully masked
    rewards, values = torch.randn(mask.numel()) * mask, torch.randn(mask.numel())
    wanted_advantages, wanted_returns = torch.zeros_like(mask), torch.zeros_like(mask)
    for rows in torch.arange(mask.numel()).split(lengths.tolist()):
        rows = rows[mask[rows] != 0]
        found = by_definition(rewards[rows].tolist(), values[rows].tolist(), gamma, lambd)
        wanted_advantages[rows], wanted_returns[rows] = map(torch.tensor, found)
    advantages, returns = generalized_advantages(rewards, values, mask, lengths, gamma=gamma, lambd=lambd)
    torch.testing.assert_close(advantages, wanted_advantages, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(returns, wanted_returns, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("length", "alpha", "expected"),
    [(1000, 0.05, 0.98), (40, 0.05, 0.5), (20, 0.05, 0.0), (7, 0.05, 0.0), (0, 0.05, 0.0), (1, 4.0, 0.75)],
)
def test_lambda_of_a_response_grows_with_its_length(length: int, alpha: float, expected: float):
    assert float(length_adaptive_lambda(torch.tensor([length]), alpha)) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("gamma", [1.0, 0.99])
@pytest.mark.parametrize("compiled", [True, False])
def test_samples_with_their_own_lambdas_follow_the_definition(
    gamma: float, compiled: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(returns, "COMPILED_FROM", 0 if compiled else 1 << 40)
    generator = torch.Generator().manual_seed(5)
    lengths = torch.tensor([7, 1, 0, 400, 16, 33, 4, 250])
    mask = (torch.rand(int(lengths.sum()), generator=generator) < 0.7).float()
    mask[428:457] = 0.0  # one sample has four trained tokens, and the next one none
    rewards, values = torch.randn(mask.numel(), generator=generator), torch.randn(mask.numel(), generator=generator)
    rewards *= mask
    acted = torch.stack([part.sum() for part in mask.split(lengths.tolist())])
    wanted_advantages, wanted_returns = torch.zeros_like(mask), torch.zeros_like(mask)
    for rows in torch.arange(mask.numel()).split(lengths.tolist()):
        rows = rows[mask[rows] != 0]
        lambd = max(0.0, 1 - 1 / (0.2 * len(rows))) if len(rows) else 0.0
        found = by_definition(rewards[rows].tolist(), values[rows].tolist(), gamma, lambd)
        wanted_advantages[rows], wanted_returns[rows] = map(torch.tensor, found)
    lambdas = length_adaptive_lambda(acted, 0.2)
    assert lambdas.min() == 0.0 and lambdas.max() > 0.98
    advantages, targets = generalized_advantages(rewards, values, mask, lengths, gamma=gamma, lambd=lambdas)
    torch.testing.assert_close(advantages, wanted_advantages, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(targets, wanted_returns, rtol=1e-6, atol=1e-6)
    one = generalized_advantages(rewards, values, mask, lengths, gamma=gamma, lambd=0.9)
    same = generalized_advantages(rewards, values, mask, lengths, gamma=gamma, lambd=torch.full((8,), 0.9).double())
    torch.testing.assert_close(torch.stack(one), torch.stack(same), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 0.95), (0.9, 1.0)])
def test_compiled_loop_gives_the_sums_in_float64_rounded_to_float32(gamma: float, lambd: float, threads: int):
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(0, 6000, (40,), generator=generator)
    lengths[[0, 7, -1]] = 0
    tokens = int(lengths.sum())
    assert tokens > returns.COMPILED_FROM
    mask = (torch.rand(tokens, generator=generator) < 0.8).float()
    mask[: int(lengths[:3].sum())] = 0.0  # two samples are fully masked
    mask[-int(lengths[-12:].sum()) :] = 1.0  # others are fully trained
    rewards, values = torch.randn(2, tokens, generator=generator)
    values[mask == 0] = math.nan  # takes part in no sum
    rewards *= mask
    wanted = torch.zeros(2, tokens, dtype=torch.float64)
    for rows in torch.arange(tokens).split(lengths.tolist()):
        after = following = 0.0
        for at in reversed(rows[mask[rows] != 0].tolist()):
            value = float(values[at])
            after = float(rewards[at]) + gamma * following - value + gamma * lambd * after
            following = value
            wanted[0, at], wanted[1, at] = after, after + value
    used = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = generalized_advantages(rewards, values, mask, lengths, gamma=gamma, lambd=lambd)
    finally:
        torch.set_num_threads(used)
    rounding = torch.finfo(torch.float32).eps / 2
    torch.testing.assert_close(torch.stack(found).double(), wanted, rtol=1.01 * rounding, atol=1e-12)


def test_compiled_and_blockwise_returns_agree(monkeypatch: pytest.MonkeyPatch):
    lengths = torch.tensor([returns.COMPILED_FROM - 10, 0, 9, 1])
    rewards = torch.randn(int(lengths.sum()), generator=torch.Generator().manual_seed(3))
    compiled = discounted_returns(rewards, lengths, 0.99)
    monkeypatch.setattr(returns, "COMPILED_FROM", rewards.numel() + 1)
    torch.testing.assert_close(compiled, discounted_returns(rewards, lengths, 0.99), rtol=1e-6, atol=1e-6)


def test_undiscounted_advantages_are_the_reward_less_the_value():
    values = torch.tensor([0.5, -1.0, 2.0])
    rewards, mask = torch.tensor([0.0, 0.0, 3.0]), torch.ones(3)
    advantages, returns = generalized_advantages(rewards, values, mask, torch.tensor([3]), gamma=1.0, lambd=1.0)
    assert advantages.tolist() == [2.5, 4.0, 1.0]
    assert returns.tolist() == [3.0, 3.0, 3.0]


def test_advantages_of_columns_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="2 rewards, 3 values and 2 mask entries came with lengths that add up to 2"):
        generalized_advantages(torch.zeros(2), torch.zeros(3), torch.ones(2), torch.tensor([2]), gamma=1.0, lambd=1.0)
