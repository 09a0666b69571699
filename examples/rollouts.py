"""A whole rollout and a whole evaluation of one's own, built on the built-in ones.

--rollout-function-path examples.rollouts.counted
--eval-function-path examples.rollouts.with_total
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slimrl.arguments import Arguments
from slimrl.hooks import DataSource
from slimrl.rollout.evaluate import EvalResult
from slimrl.rollout.rollout_function import RolloutOutput


def counted(
    args: Arguments, rollout_id: int, data_source: DataSource, *, evaluation: bool, generator: Any
) -> RolloutOutput | dict[str, EvalResult]:
    """The built-in rollout, with one number more: which share of its prompts nobody solved."""
    if evaluation:
        return generator.evaluation(rollout_id)
    made = generator.rollout(rollout_id, data_source)
    unsolved = sum(all(sample.reward_value(args.reward_key) <= 0 for sample in group) for group in made.groups)
    return dataclasses.replace(made, metrics=made.metrics | {"rollout/unsolved": unsolved / len(made.groups)})


def with_total(
    args: Arguments, rollout_id: int, data_source: None, *, evaluation: bool, generator: Any
) -> dict[str, EvalResult]:
    """The built-in evaluation, and all its sets as one more."""
    results = list(generator.evaluation(rollout_id).values())
    rewards = [reward for result in results for reward in result.rewards]
    samples = [sample for result in results for sample in result.samples]
    return {result.name: result for result in results} | {"total": EvalResult("total", rewards, samples, 1)}
