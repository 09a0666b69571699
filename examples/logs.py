"""Custom logs: one CSV line per rollout, and one per evaluation set.

--custom-rollout-log-function-path examples.logs.rollout
--custom-eval-rollout-log-function-path examples.logs.evaluation

`custom: {csv: rewards.csv}` in --custom-config-path sets the file.
"""

from __future__ import annotations

import csv
from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample


def rollout(
    rollout_id: int,
    args: Arguments,
    samples: list[Sample],
    extra_metrics: dict[str, float] | None,
    rollout_time: float,
) -> bool:
    """Writes the mean reward. Returns False: slimrl reports its own metrics too."""
    _write(args, [rollout_id, "train", _mean([sample.reward_value(args.reward_key) for sample in samples])])
    return False


def evaluation(
    rollout_id: int, args: Arguments, data: dict[str, dict[str, Any]], extra_metrics: dict[str, float] | None
) -> bool:
    """Writes the mean reward of each set; `data` has rewards, truncated and samples by name of the set."""
    for name, part in data.items():
        _write(args, [rollout_id, name, _mean(part["rewards"])])
    return False


def _write(args: Arguments, row: list[Any]) -> None:
    with open(args.custom["csv"], "a", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow(row)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
