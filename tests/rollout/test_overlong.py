"""Training rewards: DAPO's penalty of long responses, the run's moments, and truncated samples without training."""

from __future__ import annotations

import io

import numpy
import pytest
import torch

from slimrl.algorithms.estimators import OverlongPenalty, RunningMoments
from slimrl.arguments import Arguments
from slimrl.data.sample import Sample, SampleStatus
from slimrl.megatron.checkpoint.folder import encode_data_state
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


# --normalize-reward ---------------------------------------------------------------------------------------------------


def rewards_of_run(rollouts: int = 7) -> list[list[float]]:
    """Rollouts of different sizes whose mean is far above their deviation, where naive sums lose digits."""
    random = numpy.random.default_rng(20240702)
    return [(1e6 + random.normal(0.3, 2.0, size=3 + 5 * number)).tolist() for number in range(rollouts)]


def test_running_moments_equal_one_pass_of_numpy_over_all_rewards():
    moments, seen = RunningMoments(), []
    for rewards in rewards_of_run():
        moments.add(rewards)
        seen += rewards
        everything = numpy.array(seen, numpy.float64)
        assert moments.count == everything.size
        assert moments.mean == pytest.approx(everything.mean(), rel=1e-15)
        assert moments.std == pytest.approx(everything.std(ddof=1), rel=1e-9)
        expected = (numpy.array(rewards) - everything.mean()) / (everything.std(ddof=1) + 1e-8)
        assert moments.normalized(rewards) == pytest.approx(expected, rel=1e-8, abs=1e-8)


def test_equal_rewards_normalize_to_zero():
    moments = RunningMoments()
    assert (moments.count, moments.mean, moments.std, moments.normalized([2.0])) == (0, 0.0, 0.0, [0.0])
    moments.add([0.1] * 3)
    assert moments.std < 1e-16 and moments.normalized([0.1]) == pytest.approx([0.0], abs=1e-8)
    moments.add([])
    assert moments.count == 3


def test_rewards_continue_bit_equal_from_a_checkpoint(make_args):
    processing = RewardProcessing.from_args(
        make_args(advantage_estimator="ppo", normalize_reward=True, rollout_max_response_len=10)
    )
    rollouts = [[sample(reward, 2) for reward in rewards] for rewards in rewards_of_run()]
    whole, first, resumed = RunningMoments(), RunningMoments(), RunningMoments()
    results = [compute_rewards(processing, rollout, whole) for rollout in rollouts]
    for rollout in rollouts[:3]:
        compute_rewards(processing, rollout, first)
    saved = io.BytesIO(encode_data_state(first.added_to({"next_index": 5})))
    assert resumed.restored(torch.load(saved, weights_only=True)) == {"next_index": 5}
    for rollout, expected in zip(rollouts[3:], results[3:], strict=True):
        found = compute_rewards(processing, rollout, resumed)
        assert torch.equal(found.normalized, expected.normalized) and torch.equal(found.raw, expected.raw)
    assert resumed.added_to({}) == whole.added_to({})


def test_state_without_moments_begins_anew():
    moments = RunningMoments()
    moments.add([1.0, 2.0])
    assert moments.restored({"next_index": 5}) == {"next_index": 5} and moments.count == 0


def test_normalized_rewards_precede_penalty_and_group(make_args):
    flags = {"normalize_reward": True, "grpo_std_normalization": False, "rollout_max_response_len": 10}
    args = make_args(**flags, overlong_buffer_len=4, overlong_penalty_factor=0.5)
    samples = [sample(3.0, 6), sample(1.0, 8), sample(0.0, 10)]
    moments = RunningMoments()
    moments.add([5.0, -1.0])
    found = compute_rewards(RewardProcessing.from_args(args), samples, moments)
    scale = numpy.std([5.0, -1.0, 3.0, 1.0, 0.0], ddof=1)
    shaped = (numpy.array([3.0, 1.0, 0.0]) - 1.6) / scale + [0.0, -0.25, -0.5]
    assert found.raw.tolist() == [3.0, 1.0, 0.0]
    assert found.normalized.tolist() == pytest.approx(shaped - shaped.mean(), abs=1e-6)


# rewards of tokens ----------------------------------------------------------------------------------------------------


def with_rewards(*rewards: list[float] | None) -> list[Sample]:
    samples = [sample(1.0, 3) for _ in rewards]
    for number, (one, own) in enumerate(zip(samples, rewards, strict=True)):
        one.index, one.token_rewards = number, own
    return samples


def test_rewards_of_tokens_become_a_column_and_leave_the_reward_of_the_response(make_args):
    args = make_args(advantage_estimator="ppo")
    samples = with_rewards([0.5, 0.0, -1.0], [0.0, 0.25, 0.0])
    rewards = compute_rewards(RewardProcessing.from_args(args), samples)
    batch = training_batch(args, samples, rewards, hook_args=args)
    assert batch.rewards.tolist() == [1.0, 1.0]
    assert batch.token_rewards is not None and batch.token_rewards.tolist() == [0.5, 0.0, -1.0, 0.0, 0.25, 0.0]
    assert batch.select([1]).token_rewards.tolist() == [0.0, 0.25, 0.0]
    none = with_rewards(None, None)
    assert training_batch(args, none, rewards, hook_args=args).token_rewards is None


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (([0.5] * 3, None), "1 of 2 samples have no token_rewards, the first is sample 1"),
        (([0.5] * 3, [0.5] * 2), "has 2 token_rewards for 3 response tokens"),
        (
            ([0.5] * 3, [0.5, float("nan"), 0.0]),
            r"sample \d+ \(number 1 of the rollout\): token_rewards are not all finite",
        ),
    ],
)
def test_bad_rewards_of_tokens_are_rejected(make_args, rewards, message):
    args = make_args(advantage_estimator="ppo")
    samples = with_rewards(*rewards)
    with pytest.raises(ValueError, match=message):
        found = compute_rewards(RewardProcessing.from_args(args), samples)
        training_batch(args, samples, found, hook_args=args)


def test_reward_of_a_masked_token_and_a_group_relative_estimator_are_rejected(make_args):
    (one,) = with_rewards([0.0, 0.5, 0.0])
    one.loss_mask = [1, 0, 1]
    with pytest.raises(ValueError, match="entry of 0.5 at response token 1, which is masked: give the reward"):
        compute_rewards(RewardProcessing.from_args(make_args(advantage_estimator="ppo")), [one])
    with pytest.raises(ValueError, match="--advantage-estimator grpo has one reward per response: use ppo or"):
        compute_rewards(RewardProcessing.from_args(make_args()), [one])
