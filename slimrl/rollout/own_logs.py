"""Log functions of the user's: called once a rollout or an evaluation is complete, in the rollout manager's process.

Promises that the mean rewards are reported whatever such a function answers: the run's summary is made of them; and
that what such a function adds to `extra_metrics` is reported under the names that it gives, or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample, SampleStatus
from slimrl.hooks import EvalRolloutLog, HookFailedError, RolloutLog, naming, resolve
from slimrl.observability.metrics import is_known
from slimrl.rollout.evaluate import EvalResult
from slimrl.rollout.plain_numbers import plain_number

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
    told = dict(extra_metrics)
    with naming("--custom-rollout-log-function-path", path):
        replaced = function(rollout_id, args, samples, told, seconds)
    own = {_REWARD: metrics[_REWARD]} if replaced else metrics
    return own | _added(f"--custom-rollout-log-function-path {path}", told, extra_metrics, own, metrics)


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
    if not scalars:  # a function of the user's that evaluated nothing
        return {}
    function = resolve(path, EvalRolloutLog)
    told: dict[str, Any] = {}
    everything = {name: value for part in scalars.values() for name, value in part.items()}
    with naming("--custom-eval-rollout-log-function-path", path):
        replaced = function(rollout_id, args, data, told)
    if replaced:
        scalars = {name: {f"eval/{name}": scalars[name][f"eval/{name}"]} for name in scalars}
    own = {name: value for part in scalars.values() for name, value in part.items()}
    added = _added(f"--custom-eval-rollout-log-function-path {path}", told, {}, own, everything)
    last = next(reversed(scalars))  # they belong to no set of their own
    return {**scalars, last: scalars[last] | added}


def _added(
    named: str,
    told: Mapping[str, Any],
    before: Mapping[str, float],
    own: Mapping[str, float],
    everything: Mapping[str, float],
) -> dict[str, float]:
    """What a function added to, or changed in, the metrics that it was told, which were `before`.

    `own` is what slimrl reports itself of `everything` that it could: names of the others are free.
    Raises HookFailedError for a value that is no number, and for a name under which slimrl reports something itself.
    """
    added = {}
    for name, value in told.items():
        if name in before and value is before[name]:
            continue
        try:
            added[name] = plain_number(value)
        except TypeError as error:
            raise HookFailedError(f"{named} added the metric {name!r} with {value!r}: give it a number") from error
        if name not in before and (name in own or (name not in everything and is_known(name))):
            raise HookFailedError(
                f"{named} added the metric {name!r}, which is a name of slimrl's own (docs/metrics.md): give it another"
            )
    return added
