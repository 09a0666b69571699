"""Throughput, pass rates, turns, categories and correct samples of a rollout, against hand-computed numbers."""

import pytest

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample, SampleStatus
from slimrl.observability.metrics import metric_of
from slimrl.observability.metrics.registry import METRICS
from slimrl.rollout.metrics import RolloutMetricsConfig, pass_rates, rollout_metrics, throughput, turn_metrics

config = RolloutMetricsConfig.from_args


def sample(group: int, length: int, **fields) -> Sample:
    made = Sample("p", group_index=group, tokens=[0] * (4 + length), response_length=length)
    made.status, made.reward = SampleStatus.COMPLETED, 0.0
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_throughput_counts_all_and_trained_tokens_and_the_longest_sample():
    samples = [sample(0, 10), sample(0, 30, loss_mask=[1, 0, 1] * 10), sample(1, 20, remove_sample=True)]
    assert throughput(samples, 2.0, 3) == {
        "perf/rollout_time": 2.0,
        "perf/tokens_per_gpu_per_sec": 60 / 2 / 3,
        "perf/longest_sample_tokens_per_sec": 15.0,
        "perf/effective_tokens_per_gpu_per_sec": 30 / 2 / 3,
        "perf/longest_effective_sample_tokens_per_sec": 10.0,
    }


def test_tool_time_is_subtracted_from_the_longest_sample():
    samples = [sample(0, 30, metadata={"non_generation_time": 0.5}), sample(0, 10, metadata={}), sample(0, 20)]
    found = throughput(samples, 2.0, None)
    assert found["perf/longest_sample_tokens_per_sec_without_non_generation"] == 20.0
    assert found["perf/longest_effective_sample_tokens_per_sec_without_non_generation"] == 20.0
    times = {name.rpartition("/")[2]: value for name, value in found.items() if "/non_generation_time/" in name}
    assert times == {"mean": 0.5 / 3, "median": 0.0, "max": 0.5, "min": 0.0}
    assert not any("per_gpu" in name for name in found)


def test_pass_rates_are_the_unbiased_estimate_over_groups():
    samples = [sample(group, 1) for group in (0, 1) for _ in range(4)]
    rates = pass_rates(samples, [1, 0, 0, 0, 1, 1, 0, 2])
    # 1 - C(n - c, k) / C(n, k) with n = 4 and c = 1, 3
    assert rates == {
        "passrate/pass@1": pytest.approx((1 / 4 + 3 / 4) / 2),
        "passrate/pass@2": pytest.approx((1 - 3 / 6 + 1) / 2),
        "passrate/pass@4": 1.0,
    }


def test_turn_metrics_count_model_and_tool_tokens_separately():
    samples = [
        sample(0, 10, loss_mask=[1] * 4 + [0] * 6, metadata={"turn_starts": [0, 8]}),
        sample(0, 20, loss_mask=[1] * 20),
        sample(1, 6, metadata={"round_number": 6}),
    ]
    found = turn_metrics(samples, 20)
    assert found == {
        "multi_turn/raw_response_length/response_length_mean": 12.0,
        "multi_turn/raw_response_length/response_length_max": 20.0,
        "multi_turn/raw_response_length/response_length_min": 6.0,
        "multi_turn/raw_response_length/response_length_clip_ratio": pytest.approx(1 / 3),
        "multi_turn/wo_obs_response_length/response_length_mean": 10.0,
        "multi_turn/wo_obs_response_length/response_length_max": 20.0,
        "multi_turn/wo_obs_response_length/response_length_min": 4.0,
        "multi_turn/round_number_mean": 3.0,
        "multi_turn/round_number_max": 6.0,
        "multi_turn/round_number_min": 1.0,
    }


ASKED = {"log_passrate": True, "log_multi_turn": True, "log_correct_samples": True, "log_reward_category": "kind"}


def test_optional_metrics_are_added_and_every_name_is_in_the_table():
    rewards = [{"score": 1.0, "kind": "right"}, {"score": 0.0, "kind": "format"}, {"score": 1.0}, 0.0]
    samples = [sample(0, length, reward=reward) for length, reward in zip((8, 4, 2, 6), rewards, strict=True)]
    raw = [1.0, 0.0, 1.0, 0.0]
    asked = rollout_metrics(
        RolloutMetricsConfig.from_args(Arguments(rollout_max_response_len=8, rollout_num_gpus=1, **ASKED)),
        samples,
        raw,
        1.0,
    )
    assert {name: value for name, value in asked.items() if "correct" in name or "error_cat" in name} == {
        "rollout/correct_ratio": 0.5,
        "rollout/correct_length/p25": 2.0,
        "rollout/correct_length/p50": 2.0,
        "rollout/correct_length/p75": 8.0,
        "rollout/correct_length/p100": 8.0,
        "rollout/error_cat/format": 0.25,
        "rollout/error_cat/right": 0.25,
        "rollout/error_cat/missing": 0.5,
    }
    assert [name for name in asked if metric_of(name, METRICS) is None] == []
    plain = rollout_metrics(config(Arguments(rollout_max_response_len=8)), samples, raw, 1.0)
    assert not any(name.startswith(("passrate", "multi_turn", "rollout/error", "rollout/correct")) for name in plain)


def test_lengths_of_correct_samples_are_absent_without_any():
    found = rollout_metrics(config(Arguments(log_correct_samples=True)), [sample(0, 3)], [0.0], 1.0)
    assert found["rollout/correct_ratio"] == 0.0
    assert not any(name.startswith("rollout/correct_length") for name in found)


def test_replayed_rollout_has_no_throughput():
    assert not any(
        name.startswith("perf/")
        for name in rollout_metrics(
            RolloutMetricsConfig.from_args(Arguments(debug_train_only=True)), [sample(0, 3)], [0.0], 1.0
        )
    )
