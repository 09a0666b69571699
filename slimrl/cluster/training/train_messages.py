"""What a train worker and its rank's process tell each other besides calls and answers."""

from __future__ import annotations

import dataclasses
from typing import Any

from slimrl.arguments import Arguments


@dataclasses.dataclass(frozen=True)
class TrainInit:
    """What a rank must know before it can join the others."""

    args: Arguments
    rank: int
    world_size: int
    cuda: bool  # whether the run trains on GPUs


@dataclasses.dataclass(frozen=True)
class TrainReady:
    """What a rank knows after it has loaded: where training begins and which share of a rollout is its own."""

    start_rollout_id: int
    data_state: dict[str, Any] | None
    data_parallel_rank: int
