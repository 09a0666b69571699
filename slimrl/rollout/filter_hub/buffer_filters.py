"""Which waiting groups go into the next wave of requests (`--buffer-filter-path`)."""

from __future__ import annotations

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample


def pop_first(
    args: Arguments, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int
) -> list[list[Sample]]:
    """The groups that have waited longest, at most `num_samples` of them; they leave the buffer."""
    chosen = buffer[:num_samples]
    del buffer[:num_samples]
    return chosen
