"""The table of advantage estimators: each row against its paper, and RLOO's baseline by hand."""

import dataclasses
import math
import random
import statistics
import subprocess
import sys

import pytest
import torch

from slimrl.algorithms.estimators import DEFAULT, ESTIMATORS, Baseline, LengthNormalization, Objective, Returns
from slimrl.algorithms.returns import group_normalized_rewards
from slimrl.arguments.namespace import all_flag_specs

OWN = LengthNormalization.SAMPLE
# as the papers say: name -> (baseline, divided by the group's deviation, returns, objective, whitened, divisor of a
# sample's sum)
PAPERS = {
    "grpo": (Baseline.GROUP_MEAN, True, Returns.BROADCAST, Objective.PPO_CLIP, False, OWN),
    "dr_grpo": (
        Baseline.GROUP_MEAN, False, Returns.BROADCAST, Objective.PPO_CLIP, False, LengthNormalization.LONGEST
    ),
    "gspo": (Baseline.GROUP_MEAN, True, Returns.BROADCAST, Objective.GSPO_CLIP, False, OWN),
    "cispo": (Baseline.GROUP_MEAN, True, Returns.BROADCAST, Objective.CISPO, False, OWN),
    "reinforce_plus_plus": (Baseline.NONE, False, Returns.DISCOUNTED, Objective.PPO_CLIP, True, OWN),
    "reinforce_plus_plus_baseline": (
        Baseline.GROUP_MEAN, False, Returns.BROADCAST, Objective.PPO_CLIP, True, OWN
    ),
    "rloo": (Baseline.LEAVE_ONE_OUT, False, Returns.BROADCAST, Objective.PPO_CLIP, False, OWN),
    "opo": (Baseline.LENGTH_WEIGHTED, False, Returns.BROADCAST, Objective.PPO_CLIP, False, OWN),
    "ppo": (Baseline.NONE, False, Returns.GENERALIZED, Objective.PPO_CLIP, False, OWN),
}  # fmt: skip


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimator_row_matches_its_paper(name):
    row = ESTIMATORS[name]
    parts = tuple(getattr(row, field.name) for field in dataclasses.fields(row) if field.name not in ("name", "source"))
    assert parts == PAPERS[name] and row.name == name and row.source


def test_flag_accepts_every_row():
    (flag,) = (spec for spec in all_flag_specs() if spec.dest == "advantage_estimator")
    assert set(ESTIMATORS) == set(PAPERS) == set(flag.choices) and flag.default == DEFAULT


def test_table_is_read_without_torch():
    program = "import sys, slimrl.algorithms.estimators; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_rloo_baseline_is_the_mean_of_the_other_samples():
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 3.0, 7.0]), torch.tensor([4, 4, 4, 2, 2])
    advantages = group_normalized_rewards(rewards, groups, scale_by_std=False, leave_one_out=True)
    by_hand = [1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5, 3.0 - 7.0, 7.0 - 3.0]
    assert advantages.tolist() == pytest.approx(by_hand, abs=1e-6)


def test_dr_grpo_only_subtracts_the_mean_and_gives_each_token_the_same_weight():
    """Liu et al. 2025: A = R - mean_G, and the loss sum_i sum_t term / (samples x longest response)."""
    row = ESTIMATORS["dr_grpo"]
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 3.0, 7.0]), torch.tensor([4, 4, 4, 2, 2])
    advantages = group_normalized_rewards(rewards, groups, scale_by_std=row.normalizes_by_std)
    assert advantages.tolist() == pytest.approx([0.5, -0.5, 0.0, -2.0, 2.0], abs=1e-6)
    assert row.divides_by_longest and not any(
        other.divides_by_longest for other in ESTIMATORS.values() if other is not row
    )


def test_opo_baseline_is_the_mean_weighted_by_length():
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 3.0, 7.0]), torch.tensor([4, 4, 4, 2, 2])
    lengths = torch.tensor([10, 30, 20, 5, 15])
    advantages = group_normalized_rewards(rewards, groups, scale_by_std=False, weights=lengths)
    first, second = (10 * 1.0 + 20 * 0.5) / 60, (5 * 3.0 + 15 * 7.0) / 20
    by_hand = [1.0 - first, 0.0 - first, 0.5 - first, 3.0 - second, 7.0 - second]
    assert advantages.tolist() == pytest.approx(by_hand, abs=1e-6)


def test_opo_baseline_has_the_least_variance_for_tokens_of_equal_gradient_norm():
    """With orthogonal unit gradients per token the variance of `sum(grad) * (r - b)` is that of l (r - b)^2."""
    draw = random.Random(2)
    rewards = [draw.random() for _ in range(40)]
    lengths = [draw.randint(1, 99) for _ in range(40)]
    found = group_normalized_rewards(
        torch.tensor(rewards, dtype=torch.float64), torch.zeros(40), scale_by_std=False, weights=torch.tensor(lengths)
    )
    baseline = rewards[0] - float(found[0])

    def variance(b: float) -> float:
        return math.fsum(n * (r - b) ** 2 for n, r in zip(lengths, rewards, strict=True))

    assert all(variance(baseline) < variance(baseline + step) for step in (-1e-3, 1e-3))
    assert variance(baseline) < variance(statistics.mean(rewards)) - 1e-3


def test_equal_lengths_give_the_plain_mean_and_no_lengths_too():
    rewards, groups = torch.tensor([1.0, 0.0, 0.5]), torch.zeros(3)
    plain = group_normalized_rewards(rewards, groups, scale_by_std=False)
    for weights in (torch.full((3,), 7), torch.zeros(3)):
        weighted = group_normalized_rewards(rewards, groups, scale_by_std=False, weights=weights)
        torch.testing.assert_close(weighted, plain)
    with pytest.raises(ValueError, match="give weights or leave_one_out"):
        group_normalized_rewards(rewards, groups, weights=torch.ones(3), leave_one_out=True)


def test_rloo_gives_zero_advantage_to_equal_rewards_and_single_samples():
    rewards, groups = torch.tensor([0.1, 0.1, 0.1, 2.0]), torch.tensor([0, 0, 0, 1])
    assert group_normalized_rewards(rewards, groups, scale_by_std=False, leave_one_out=True).tolist() == [0.0] * 4
