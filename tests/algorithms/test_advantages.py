"""Group-normalised rewards against statistics.stdev and hand computation."""

import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slimrl.algorithms.returns import group_normalized_rewards


def test_rewards_are_centered_and_divided_by_the_unbiased_group_std():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 5.0])
    groups = torch.tensor([7, 7, 7, 7, 2, 2])
    # group 7: mean 1/2, variance 4 * 0.25 / 3 = 1/3; group 2: mean 4, variance 2
    expected = [0.8660254, -0.8660254, -0.8660254, 0.8660254, -0.7071068, 0.7071068]
    assert group_normalized_rewards(rewards, groups).tolist() == pytest.approx(expected, abs=3e-6)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 5)), min_size=1, max_size=24))
def test_samples_are_grouped_by_id_regardless_of_position(samples):
    rewards = [reward / 3 for _, reward in samples]
    groups = [group for group, _ in samples]
    expected = []
    for group, reward in zip(groups, rewards, strict=True):
        members = [r for g, r in zip(groups, rewards, strict=True) if g == group]
        if len(set(members)) == 1:
            expected.append(0.0)
        else:
            expected.append((reward - statistics.mean(members)) / (statistics.stdev(members) + 1e-6))
    result = group_normalized_rewards(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
    assert result.dtype == torch.float32
    assert result.tolist() == pytest.approx(expected, abs=1e-5)


def test_groups_with_equal_rewards_get_exactly_zero():
    # The float32 mean of three times 0.1 is not 0.1; divided by eps the difference would be a real advantage.
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.7])
    assert group_normalized_rewards(rewards, torch.tensor([0, 0, 0, 1])).tolist() == [0.0, 0.0, 0.0, 0.0]


def test_dr_grpo_only_centers():
    result = group_normalized_rewards(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0, 0, 5]), scale_by_std=False)
    assert result.tolist() == [0.5, -0.5, 0.0]


def test_uncentered_rewards_are_scaled_when_their_group_has_spread():
    result = group_normalized_rewards(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([0, 0, 5]), center=False)
    assert result.tolist() == pytest.approx([0.7071063, 2.1213188, 2.0], rel=1e-6)
    untouched = group_normalized_rewards(
        torch.tensor([1.0, 3.0, 2.0]), torch.tensor([0, 0, 5]), center=False, scale_by_std=False
    )
    assert untouched.tolist() == [1.0, 3.0, 2.0]


def test_sample_order_does_not_matter():
    rng = random.Random(0)
    rewards = torch.tensor([rng.random() for _ in range(32)])
    groups = torch.arange(32) // 8
    shuffled = torch.tensor(rng.sample(range(32), 32))
    direct = group_normalized_rewards(rewards, groups)
    assert torch.allclose(group_normalized_rewards(rewards[shuffled], groups[shuffled]), direct[shuffled], atol=1e-7)


def test_mismatched_shapes_are_rejected():
    with pytest.raises(ValueError, match=r"shape \[3\] and group ids \[2\]"):
        group_normalized_rewards(torch.zeros(3), torch.zeros(2, dtype=torch.int64))
