"""What one rollout hands over: its groups and the metrics that the samples alone do not tell."""

from __future__ import annotations

import dataclasses

from slimrl.data.sample import Sample


@dataclasses.dataclass(frozen=True)
class RolloutOutput:
    """`--rollout-batch-size` groups sorted by index, and flat metrics by name."""

    groups: list[list[Sample]]
    metrics: dict[str, float]
