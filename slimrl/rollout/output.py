"""What one rollout hands over: its groups and the metrics that the samples alone do not tell."""

from __future__ import annotations

import dataclasses
from typing import Any

from slimrl.data.sample import Sample


@dataclasses.dataclass(frozen=True)
class RolloutOutput:
    """`--rollout-batch-size` groups sorted by index, and flat metrics by name.

    `data_state` is what a checkpoint must know of the data, where more is on its way than the data source knows of;
    None elsewhere, and where nothing is saved.
    `seconds` is how long its generation took, where the groups were on their way before it was asked for.
    """

    groups: list[list[Sample]]
    metrics: dict[str, float]
    data_state: dict[str, Any] | None = None
    seconds: float | None = None
