"""The definition of a metric, and the lookup of names in the table of all metrics (`registry`).

Called by the run log, which combines the optimizer steps of a rollout by it, by the docs and by the tests.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Literal

Combine = Literal["mean", "max", "sum", "last"]
# fields of a step in the summary that are not metrics
NON_METRIC_FIELDS = {"step", "reward", "weight_version", "seconds", "optimizer_steps", "memory", "by_optimizer_step"}
# first part of a name -> its horizontal axis
AXES = {
    "train": "train/step",
    "eval": "eval/step",
    "rollout": "rollout/step",
    "perf": "rollout/step",
    "memory": "rollout/step",
    "multi_turn": "rollout/step",
    "passrate": "rollout/step",
}


@dataclasses.dataclass(frozen=True)
class Metric:
    """One row of the table.

    In `name`, `{a,b}` stands for one of these words and `<x>` for any text without a slash. `combine` reduces the
    optimizer steps of one rollout to the value in `summary.json`; it applies only under `train/`. `when` is empty if
    every run reports the metric.
    """

    name: str
    meaning: str
    unit: str = ""
    combine: Combine = "mean"
    when: str = ""

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the names that this row stands for."""
        parts = re.split(r"(\{[^}]*\}|<[^>]*>)", self.name)
        return re.compile("".join(_pattern_of(part) for part in parts))

    @property
    def axis(self) -> str:
        """Name of its horizontal axis, see `axis_of`."""
        return axis_of(self.name)


def axis_of(name: str) -> str:
    """The horizontal axis of a metric: its optimizer step, the rollouts done before it, or the rollout."""
    return AXES.get(name.split("/", 1)[0], "rollout/step")


def metric_of(name: str, table: Sequence[Metric]) -> Metric | None:
    """The first row that matches `name`; None for a name from a custom function."""
    return next((metric for metric in table if metric.pattern.fullmatch(name)), None)


def is_known(name: str) -> bool:
    """Whether slimrl itself may report something under this name, in the charts or, without a slash, in the summary."""
    from slimrl.observability.metrics.registry import METRICS

    full = name if "/" in name else f"train/{name}"
    return name in NON_METRIC_FIELDS or metric_of(full, METRICS) is not None


def combine_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """One number per name (without `train/`) from the optimizer steps of one rollout.

    A single step comes back unchanged; names that are not in the table are averaged.
    """
    if len(steps) == 1:
        return dict(steps[0])
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: _combine(_rule(name), [step[name] for step in steps if name in step]) for name in names}


def _rule(name: str) -> Combine:
    from slimrl.observability.metrics.training_rows import TRAIN

    metric = metric_of(f"train/{name}", TRAIN)
    return "mean" if metric is None else metric.combine


def _combine(rule: Combine, values: list[float]) -> float:
    if rule == "max":
        # max() of a list with NaN depends on its order; a NaN must not be hidden.
        return math.nan if any(math.isnan(value) for value in values) else max(values)
    if rule == "sum":
        return math.fsum(values)
    if rule == "last":
        return values[-1]
    return sum(values) / len(values)


def _pattern_of(part: str) -> str:
    if part.startswith("{"):
        return "(?:" + "|".join(map(re.escape, part[1:-1].split(","))) + ")"
    return "[^/]+" if part.startswith("<") else re.escape(part)
