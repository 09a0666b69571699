"""Flags for looking into a run: dumps, replay, one side alone, the plan of a run that is not started."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class DebugArguments:
    """Dumps and partial runs."""

    save_debug_rollout_data: str | None = flag(None, "write each rollout's samples here (path with {rollout_id} in it)")
    load_debug_rollout_data: str | None = flag(
        None, "train on rollouts written before (path with {rollout_id} in it); implies --debug-train-only"
    )
    debug_train_only: bool = flag(False, "no engines: train on --load-debug-rollout-data")
    debug_rollout_only: bool = flag(False, "no training: only generate and judge")
    dry_run: bool = flag(False, "check everything, print what would be started and how much memory it needs, and exit")
    slot_memory_gib: float | None = flag(
        None,
        "memory of one slot that --dry-run plans with (GiB; what nvidia-smi says, without GPUs the machine's by slots)",
        above=0,
    )
