"""A custom rollout function and a custom evaluation function that use the built-in ones.

--rollout-function-path examples.rollouts.counted
--eval-function-path examples.rollouts.with_total
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slimrl.arguments import Arguments
from slimrl.hooks import DataSource
from slimrl.rollout.metrics import EvalResult
from slimrl.rollout.rollout_function import RolloutOutput


def counted(
    args: Arguments, rollout_id: int, data_source: DataSource, *, evaluation: bool, generator: Any
) -> RolloutOutput | dict[str, EvalResult]:
    """The built-in rollout, with an extra metric: the fraction of prompts without a right answer."""
    if evaluation:
        return generator.evaluation(rollout_id)
    output = generator.rollout(rollout_id, data_source)
    unsolved = sum(all(sample.reward_value(args.reward_key) <= 0 for sample in group) for group in output.groups)
    return dataclasses.replace(output, metrics=output.metrics | {"rollout/unsolved": unsolved / len(output.groups)})


def with_total(
    args: Arguments, rollout_id: int, data_source: None, *, evaluation: bool, generator: Any
) -> dict[str, EvalResult]:
    """The built-in evaluation, plus all its sets together as the set "total"."""
    results = list(generator.evaluation(rollout_id).values())
    rewards = [reward for result in results for reward in result.rewards]
    samples = [sample for result in results for sample in result.samples]
    return {result.name: result for result in results} | {"total": EvalResult("total", rewards, samples, 1)}
