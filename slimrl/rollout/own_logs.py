"""Log functions of the user's: called once a rollout or an evaluation is complete, in the rollout manager's process.

Promises that the mean rewards are reported whatever such a function answers: the run's summary is made of them.
"""

from __future__ import annotations

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample, SampleStatus
from slimrl.hooks import EvalRolloutLog, RolloutLog, naming, resolve
from slimrl.rollout.evaluate import EvalResult

_REWARD = "rollout/raw_reward"


def reported_metrics(
    args: Arguments,
    rollout_id: int,
    samples: list[Sample],
    metrics: dict[str, float],
    extra_metrics: dict[str, float],
    seconds: float,
) -> dict[str, float]:
    """What slimrl reports of `metrics`; `extra_metrics` are those among them that the rollout itself brought."""
    path = args.custom_rollout_log_function_path
    if path is None:
        return metrics
    function = resolve(path, RolloutLog)
    with naming("--custom-rollout-log-function-path", path):
        replaced = function(rollout_id, args, samples, extra_metrics or None, seconds)
    return {_REWARD: metrics[_REWARD]} if replaced else metrics


def reported_scalars(args: Arguments, rollout_id: int, results: dict[str, EvalResult]) -> dict[str, dict[str, float]]:
    """What slimrl reports of each evaluation set, by its name."""
    scalars = {name: result.metrics() for name, result in results.items()}
    path = args.custom_eval_rollout_log_function_path
    if path is None:
        return scalars
    data = {
        name: {
            "rewards": result.rewards,
            "truncated": [sample.status is SampleStatus.TRUNCATED for sample in result.samples],
            "samples": result.samples,
        }
        for name, result in results.items()
    }
    function = resolve(path, EvalRolloutLog)
    with naming("--custom-eval-rollout-log-function-path", path):
        replaced = function(rollout_id, args, data, None)
    return {name: {f"eval/{name}": scalars[name][f"eval/{name}"]} for name in scalars} if replaced else scalars
