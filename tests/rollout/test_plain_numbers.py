"""Numbers returned by custom functions become plain numbers, or an error that names the function."""

import json
import math
import types

import numpy as np
import pytest
import torch

from slimrl.data.sample import Sample
from slimrl.hooks import HookFailedError
from slimrl.rollout.metrics import EvalResult
from slimrl.rollout.rm_hub.scorer import as_reward, as_rewards
from slimrl.rollout.rollout_function import RolloutOutput, eval_results, rollout_output

SAMPLE = Sample("p", tokens=[1, 2], response_length=1)
NUMBERS = {"rollout/a": np.float32(0.5), "rollout/b": torch.tensor(2), "c": True, "d": 3}
PLAIN = {"rollout/a": 0.5, "rollout/b": 2.0, "c": 1.0, "d": 3.0}


@pytest.mark.parametrize("returned", [RolloutOutput, lambda g, m: types.SimpleNamespace(samples=g, metrics=m)])
def test_metrics_of_a_custom_rollout_function_become_plain_numbers(returned):
    metrics = rollout_output(returned([[SAMPLE]], NUMBERS), "my.rollout").metrics
    assert metrics == PLAIN and {type(value) for value in metrics.values()} == {float}
    json.dumps(metrics)


@pytest.mark.parametrize("value", ["0.5", None, torch.zeros(2), np.zeros(2), [1.0], {}])
def test_non_numeric_metric_is_named(value):
    with pytest.raises(HookFailedError, match="my.rollout returned .* for the metric .rollout/a."):
        rollout_output(RolloutOutput([[SAMPLE]], {"ok": 1.0, "rollout/a": value}), "my.rollout")


@pytest.mark.parametrize("value", ["0.5", None, math.nan, -math.inf, torch.zeros(2)])
def test_rewards_of_a_custom_evaluation_are_plain_or_named(value):
    rewards = [np.float32(1), torch.tensor(0.25)]
    found = eval_results({"a": EvalResult("a", rewards, [], 2), "b": {"rewards": rewards, "samples": []}}, "my.eval")
    for result in found.values():
        assert result.rewards == [1.0, 0.25] and {type(reward) for reward in result.rewards} == {float}
    assert found["a"].n_samples_per_prompt == 2
    with pytest.raises(HookFailedError, match="the evaluation function my.eval returned .* as reward 1 of 'b'"):
        eval_results({"b": {"rewards": [1.0, value], "samples": []}}, "my.eval")


@pytest.mark.parametrize("value", [math.nan, math.inf, torch.tensor(math.nan), np.float64("-inf")])
def test_non_finite_reward_names_its_function(value):
    with pytest.raises(ValueError, match="the reward function my.judge returned -?(nan|inf): .* a finite number"):
        as_reward("my.judge", value)
    with pytest.raises(ValueError, match="my.judge"):
        as_rewards("my.judge", [1.0, value], 2)
    assert as_rewards("my.judge", [True, np.float32(0.5), {"score": 1}], 3) == [1.0, 0.5, {"score": 1}]
