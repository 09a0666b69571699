"""Flags of profilers and memory records."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag

_PROFILE = "use --use-pytorch-profiler, or profile a rank from outside with nsys or py-spy"


@dataclasses.dataclass
class ProfilingArguments:
    """Profilers."""

    use_pytorch_profiler: bool = flag(
        False, "profile training with torch's profiler, into <run folder>/profile (one trace per rank, rollout, part)"
    )
    profile: bool = flag(False, "mark the steps to profile for Nsight", not_served=_PROFILE)
    profile_step_start: int = flag(10, "first rollout that is profiled", at_least=0)
    profile_step_end: int = flag(12, "rollout before which profiling ends", at_least=1)
    profile_ranks: list[int] = flag([0], "training ranks that are profiled", nargs="+")
    profile_target: list[str] = flag(
        ["train_overall"],
        "part of training that is profiled: all of it, forward and backward passes with the optimizer step, or the"
        " passes for log-probabilities",
        choices=("train_overall", "train_actor", "train_log_probs"),
        nargs="+",
    )
    record_memory_history: bool = flag(False, "record every allocation on the GPUs of training")
    memory_recorder: str = flag(
        "torch",
        "who records them",
        choices=("torch", "memray"),
        not_served="--record-memory-history records the GPU's memory with torch; leave it out",
    )
    memory_snapshot_dir: str = flag(".", "folder of the records (path)")
    memory_snapshot_path: str = flag("snapshot.pickle", "file of the record, behind the rank it is of (rank0-...)")
    memory_snapshot_num_steps: int | None = flag(
        None, "rollouts that are recorded (count; until training ends, or until the memory is full)", at_least=1
    )
    manual_gc: bool = flag(
        False, "collect garbage at fixed steps only", not_served="Python decides when to collect; leave it out"
    )
    manual_gc_interval: int = flag(0, "steps between two collections", not_served="it belongs to --manual-gc")
