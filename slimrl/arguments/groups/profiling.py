"""Flags of profilers and memory records."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag

_PROFILE = "no profiler is wired in yet; profile a worker from outside, for example with py-spy"
_MEMORY = "memory is not recorded in this version; leave it out"


@dataclasses.dataclass
class ProfilingArguments:
    """Profilers."""

    use_pytorch_profiler: bool = flag(False, "torch's profiler", not_served=_PROFILE)
    profile: bool = flag(False, "mark the steps to profile for Nsight", not_served=_PROFILE)
    profile_step_start: int = flag(10, "first rollout that is profiled", not_served=_PROFILE)
    profile_step_end: int = flag(12, "rollout before which profiling ends", not_served=_PROFILE)
    profile_ranks: list[int] = flag([0], "training ranks that are profiled", nargs="+", not_served=_PROFILE)
    profile_target: list[str] = flag(
        ["train_overall"],
        "part of training that is profiled",
        choices=("train_overall", "train_actor", "train_log_probs"),
        nargs="+",
        not_served=_PROFILE,
    )
    record_memory_history: bool = flag(False, "record allocations", not_served=_MEMORY)
    memory_recorder: str = flag("torch", "who records them", choices=("torch", "memray"), not_served=_MEMORY)
    memory_snapshot_dir: str = flag(".", "folder of the records", not_served=_MEMORY)
    memory_snapshot_path: str = flag("snapshot.pickle", "file of the record", not_served=_MEMORY)
    memory_snapshot_num_steps: int | None = flag(None, "rollouts that are recorded (count)", not_served=_MEMORY)
    manual_gc: bool = flag(
        False, "collect garbage at fixed steps only", not_served="Python decides when to collect; leave it out"
    )
    manual_gc_interval: int = flag(0, "steps between two collections", not_served="it belongs to --manual-gc")
