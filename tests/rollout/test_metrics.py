"""Metrics and training rewards of a rollout small enough to compute by hand."""

import math
import random
import sys
import zlib

import pytest
import torch

from slimrl.data.sample import RewardError, Sample, SampleStatus
from slimrl.rollout.convert_samples import RewardProcessing, compute_rewards
from slimrl.rollout.metrics import (
    START_ROLLOUT_ID,
    dynamic_filter_metrics,
    is_repetitive,
    partial_metrics,
    pass_at_k,
    sample_metrics,
)

processing = RewardProcessing.from_args


def sample(group, reward, length=1, status=SampleStatus.COMPLETED, **changes):
    return Sample(
        prompt="q", group_index=group, index=0, tokens=[0] * (2 + length), response_length=length, reward=reward,
        status=status, **changes
    )  # fmt: skip


def test_every_metric_matches_the_manual_calculation():
    samples = [
        sample(0, 1.0, length=1, response="a"),
        sample(0, 0.0, length=2, status=SampleStatus.TRUNCATED, response="la " * 200),
        sample(1, 1.0, length=3, metadata={"reward_failure": "slow"}),
        sample(1, 1.0, length=10),
    ]
    assert sample_metrics(samples, [1.0, 0.0, 1.0, 1.0]) == pytest.approx(
        {
            "rollout/raw_reward": 0.75,
            "rollout/raw_reward_std": 0.5,  # sqrt((3 * 0.25^2 + 0.75^2) / 3)
            "rollout/response_len/mean": 4.0,
            "rollout/response_len/median": 2.5,
            "rollout/response_len/max": 10.0,
            "rollout/response_len/min": 1.0,
            "rollout/prompt_len/mean": 2.0,
            "rollout/truncated_ratio": 0.25,
            "rollout/repetition_frac": 0.25,
            "rollout/reward_failures": 1.0,
            "rollout/zero_std/ratio": 0.5,
            "rollout/zero_std/count_1": 1.0,
        }
    )


def test_std_of_two_rewards_is_unbiased_and_of_one_is_zero():
    two = sample_metrics([sample(0, 1.0), sample(0, 0.0)], [1.0, 0.0])
    assert two["rollout/raw_reward_std"] == pytest.approx(math.sqrt(0.5))  # sqrt(2 * 0.5^2 / (2 - 1))
    assert sample_metrics([sample(0, 1.0)], [1.0])["rollout/raw_reward_std"] == 0.0


def test_aborted_sample_is_not_counted_as_truncated():
    samples = [sample(0, 1.0, status=status) for status in (SampleStatus.ABORTED, SampleStatus.TRUNCATED)]
    assert sample_metrics(samples, [1.0, 1.0])["rollout/truncated_ratio"] == 0.5


def test_continued_and_left_counts_of_a_partial_rollout_match_the_manual_count():
    accepted = [[sample(0, 1.0, metadata={START_ROLLOUT_ID: 4}), sample(0, 1.0, metadata={START_ROLLOUT_ID: 7})]]
    left = [[sample(1, 0.0, status=status) for status in SampleStatus], [sample(2, 0.0)]]
    assert partial_metrics(7, accepted, left) == {
        "rollout/partial/continued": 1.0,
        "rollout/partial/oldest": 3.0,
        "rollout/partial/carried_over": 2.0,
        "rollout/partial/unfinished": 2.0,  # the pending one and the aborted one
    }


def test_metrics_do_not_depend_on_sample_order():
    rng = random.Random(1)
    samples = [sample(index // 4, rng.random(), length=rng.randrange(1, 99)) for index in range(64)]
    shuffled = rng.sample(samples, len(samples))
    metrics = [sample_metrics(part, torch.tensor([one.reward for one in part])) for part in (samples, shuffled)]
    assert metrics[0] == metrics[1]


def test_small_negative_rewards_count_as_zero():
    samples = [sample(0, -0.01), sample(1, 0.02), sample(2, -0.2)]
    found = sample_metrics(samples, [-0.01, 0.02, -0.2])
    counts = {name: value for name, value in found.items() if "/count_" in name}
    assert counts == {"rollout/zero_std/count_0": 2.0, "rollout/zero_std/count_-0.2": 1.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_reward_is_rejected_with_its_sample(make_args, tmp_path, monkeypatch, value):
    samples = [sample(0, 1.0), sample(0, value)]
    samples[1].index = 7
    with pytest.raises(ValueError, match=f"sample 7: the reward is {value}: return a finite number"):
        compute_rewards(processing(make_args()), samples)
    samples[1].reward = {"score": value}
    with pytest.raises(ValueError, match=f"sample 7: the reward \\(--reward-key score\\) is {value}"):
        samples[1].reward_value("score")
    (tmp_path / "infinite_hooks.py").write_text(
        f"def process(args, samples):\n    return [1.0, 0.0], [1.0, float('{value}')]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    expected = f"infinite_hooks.process returned 0.0 and {value} as rewards of sample 7"
    with pytest.raises(ValueError, match=expected):
        compute_rewards(processing(make_args(custom_reward_post_process_path="infinite_hooks.process")), samples)
    sys.modules.pop("infinite_hooks")


def test_rollout_without_samples_or_with_missing_rewards_is_rejected():
    with pytest.raises(ValueError, match="0 samples with 0 rewards"):
        sample_metrics([], [])
    with pytest.raises(ValueError, match="1 samples with 2 rewards"):
        sample_metrics([sample(0, 1.0)], [1.0, 2.0])


def test_filter_counts_are_named_by_reason():
    assert dynamic_filter_metrics({"zero_std_1.0": 3}, 2) == {
        "rollout/dynamic_filter/drop_zero_std_1.0": 3.0,
        "rollout/dynamic_filter/carried_over": 2.0,
    }


@pytest.mark.parametrize(
    ("n", "passed", "k", "chance"), [(4, 1, 2, 0.5), (4, 0, 4, 0.0), (4, 4, 1, 1.0), (5, 2, 2, 0.7)]
)
def test_pass_at_k_equals_the_closed_form(n, passed, k, chance):
    assert pass_at_k(n, passed, k) == pytest.approx(chance)


def test_only_loops_count_as_repetition():
    rng = random.Random(0)
    words = ["sum", "of", "the", "angles", "is", "equal", "to", "half", "a", "circle", "so", "we", "get", "x", "=", "7"]
    prose = " ".join(rng.choice(words) for _ in range(3000))
    assert not is_repetitive(prose)
    assert is_repetitive(prose + "wait, " * 3000)
    assert is_repetitive("0" * 500)
    assert is_repetitive("0" * 200) and not is_repetitive("0" * 199)
    assert len(prose) > 10_000 and not is_repetitive("0" * 10**5 + prose[:10_000])


def test_more_than_ten_times_smaller_counts_as_repetition():
    letters = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=100))
    texts = [letters + "a" * count for count in range(100, 3000)]
    ratios = [len(text) / len(zlib.compress(text.encode(), 1)) for text in texts]
    assert any(9 < ratio < 10 for ratio in ratios) and any(10 < ratio < 11 for ratio in ratios)
    assert [is_repetitive(text) for text in texts] == [ratio > 10 for ratio in ratios]


def test_rewards_are_normalized_within_their_group_regardless_of_position(make_args):
    samples = [sample(7, 1.0), sample(3, 5.0), sample(7, 0.0), sample(3, 5.0), sample(7, 0.5)]
    rewards = compute_rewards(processing(make_args()), samples)
    assert rewards.raw.tolist() == [1.0, 5.0, 0.0, 5.0, 0.5]
    # group 7: mean 0.5, unbiased std 0.5
    assert rewards.normalized.tolist() == pytest.approx([1.0, 0.0, -1.0, 0.0, 0.0], abs=1e-5)


def test_both_normalization_flags_are_applied(make_args):
    samples = [sample(0, 1.0), sample(0, 0.0), sample(0, 0.5)]
    centred = compute_rewards(processing(make_args(grpo_std_normalization=False)), samples).normalized
    assert centred.tolist() == pytest.approx([0.5, -0.5, 0.0])
    raw = compute_rewards(processing(make_args(rewards_normalization=False)), samples).normalized
    assert raw.tolist() == [1.0, 0.0, 0.5]


def test_each_estimator_uses_its_own_baseline(make_args):
    samples = [sample(0, 1.0), sample(0, 0.0), sample(0, 0.5)]

    def normalized(estimator: str) -> list[float]:
        return compute_rewards(processing(make_args(advantage_estimator=estimator)), samples).normalized.tolist()

    assert normalized("dr_grpo") == pytest.approx([0.5, -0.5, 0.0])
    assert normalized("rloo") == pytest.approx([0.75, -0.75, 0.0])
    assert normalized("reinforce_plus_plus_baseline") == pytest.approx([0.5, -0.5, 0.0])
    assert normalized("reinforce_plus_plus") == [1.0, 0.0, 0.5]
    for one, (length, mask) in zip(samples, [(2, None), (6, [1, 0, 1, 1, 1, 0]), (4, None)], strict=True):
        one.response_length, one.loss_mask = length, mask
    mean = (2 * 1.0 + 4 * 0.0 + 4 * 0.5) / 10  # by trained tokens
    assert normalized("opo") == pytest.approx([1.0 - mean, -mean, 0.5 - mean])
    samples[2].remove_sample = True  # it has no trained tokens
    mean = (2 * 1.0 + 4 * 0.0) / 6
    assert normalized("opo") == pytest.approx([1.0 - mean, -mean, 0.5 - mean])


def test_reward_key_selects_the_entry(make_args):
    samples = [sample(0, {"score": 1.0, "acc": 9}), sample(0, {"score": 0.0, "acc": 9})]
    assert compute_rewards(processing(make_args(reward_key="score")), samples).raw.tolist() == [
        1.0,
        0.0,
    ]
    sentence = (
        r"sample 0 of evaluation set 'math': .* keys \['score'\] and --eval-reward-key is 'acc': give --eval-reward-key"
    )
    with pytest.raises(RewardError, match=sentence):
        Sample(prompt="", index=0, reward={"score": 1.0}).reward_value("acc", "math")
    with pytest.raises(ValueError, match="give --reward-key"):
        compute_rewards(processing(make_args()), samples)


def test_custom_post_process_function_replaces_both(make_args, tmp_path, monkeypatch):
    (tmp_path / "post_hooks.py").write_text(
        "def double(args, samples):\n"
        "    raw = [sample.reward for sample in samples]\n"
        "    return raw, [2 * reward for reward in raw]\n"
        "def short(args, samples):\n"
        "    return [1.0], [1.0]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    samples = [sample(0, 1.0), sample(0, 0.5)]
    rewards = compute_rewards(processing(make_args(custom_reward_post_process_path="post_hooks.double")), samples)
    assert rewards.raw.tolist() == [1.0, 0.5] and rewards.normalized.tolist() == [2.0, 1.0]
    with pytest.raises(ValueError, match="return two lists of 2 numbers"):
        compute_rewards(processing(make_args(custom_reward_post_process_path="post_hooks.short")), samples)
