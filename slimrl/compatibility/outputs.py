"""What a rollout function written for slime returns."""

from __future__ import annotations

import dataclasses
from typing import Any

from slimrl.data.sample import Sample


@dataclasses.dataclass
class RolloutFnTrainOutput:
    """Groups of samples, and metrics by name."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclasses.dataclass
class RolloutFnEvalOutput:
    """By name of the set a dict with its `rewards` and `samples`. Raises ValueError where it is given metrics."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.metrics:
            raise ValueError(
                f"metrics {sorted(self.metrics)} of an evaluation belong to no set: report them in"
                " --custom-eval-rollout-log-function-path"
            )
