"""Long responses: DAPO's penalty in the training rewards, and truncated samples without training."""

from __future__ import annotations

import pytest

from slimrl.algorithms.reward_shaping import OverlongPenalty
from slimrl.arguments import Arguments
from slimrl.data.sample import Sample, SampleStatus
from slimrl.rollout.convert_samples import RewardProcessing, compute_rewards, remove_truncated, training_batch
from slimrl.rollout.metrics import RolloutMetricsConfig, rollout_metrics

LONGEST, BUFFER = 16_384 + 4_096, 4_096  # DAPO, section 4.1


def dapo(length: int) -> float:
    """Equation 13 of Yu et al. 2025, case by case."""
    if length <= LONGEST - BUFFER:
        return 0.0
    if length <= LONGEST:
        return ((LONGEST - BUFFER) - length) / BUFFER
    return -1.0


def sample(reward: float, length: int, status: SampleStatus = SampleStatus.COMPLETED) -> Sample:
    made = Sample("p", group_index=0, index=length, tokens=[0] * (4 + length), response_length=length, reward=reward)
    made.status, made.rollout_log_probs = status, [0.0] * length
    return made


def test_penalty_is_that_of_the_paper_at_every_length():
    penalty = OverlongPenalty(LONGEST, BUFFER, 1.0)
    lengths = [1, 16_383, 16_384, 16_385, 18_432, 20_479, 20_480, 20_481, 50_000]
    assert [penalty(length) for length in lengths] == pytest.approx([dapo(length) for length in lengths], abs=1e-15)
    assert penalty(18_432) == -0.5 and OverlongPenalty(LONGEST, BUFFER, 0.3)(LONGEST) == -0.3


def test_penalty_changes_training_rewards_before_the_group_is_normalized(make_args):
    args = make_args(
        rollout_max_response_len=10, overlong_buffer_len=4, overlong_penalty_factor=0.5, grpo_std_normalization=False
    )
    samples = [sample(1.0, 6), sample(1.0, 8), sample(0.0, 10)]
    rewards = compute_rewards(RewardProcessing.from_args(args), samples)
    assert rewards.raw.tolist() == [1.0, 1.0, 0.0]  # as scored
    shaped = [1.0, 1.0 - 0.25, 0.0 - 0.5]
    mean = sum(shaped) / 3
    assert rewards.normalized.tolist() == pytest.approx([reward - mean for reward in shaped])
    args.rewards_normalization = False
    assert compute_rewards(RewardProcessing.from_args(args), samples).normalized.tolist() == pytest.approx(shaped)


def test_penalty_is_reported():
    flags = Arguments(rollout_max_response_len=10, overlong_buffer_len=4)
    samples = [sample(1.0, 6), sample(1.0, 8), sample(0.0, 10)]
    found = rollout_metrics(RolloutMetricsConfig.from_args(flags), samples, [1.0, 1.0, 0.0], 1.0)
    assert found["rollout/overlong_penalty"] == pytest.approx(-0.5)
    assert found["rollout/overlong_ratio"] == pytest.approx(2 / 3)
    assert found["rollout/raw_reward"] == pytest.approx(2 / 3)


def test_truncated_samples_are_not_trained_on_and_count_in_their_group(make_args):
    samples = [sample(1.0, 3), sample(0.0, 5, SampleStatus.TRUNCATED)]
    remove_truncated(samples, asked=False)
    assert [one.remove_sample for one in samples] == [False, False]
    remove_truncated(samples, asked=True)
    assert [one.remove_sample for one in samples] == [False, True]
    args = make_args(grpo_std_normalization=False)
    rewards = compute_rewards(RewardProcessing.from_args(args), samples)
    batch = training_batch(args, samples, rewards, hook_args=args)
    assert batch.loss_mask.tolist() == [1.0] * 3 + [0.0] * 5
    assert batch.rewards.tolist() == [0.5, -0.5]
