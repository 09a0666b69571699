"""Rules about profilers and memory records: what is asked for is recorded, by some rank in some rollout."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.flag import flag_specs
from slimrl.arguments.groups.profiling import ProfilingArguments
from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context

_OF_PROFILER = ("profile_step_start", "profile_step_end", "profile_ranks", "profile_target")
_OF_RECORD = ("memory_snapshot_dir", "memory_snapshot_path", "memory_snapshot_num_steps")
_PROFILER = "--use-pytorch-profiler"


def profiling_flags_have_their_switch(args: Arguments, context: Context) -> Iterator[Problem]:
    """A setting of what is off is a slip."""
    for spec in flag_specs(ProfilingArguments):
        for names, needed, given in (
            (_OF_PROFILER, _PROFILER, args.use_pytorch_profiler),
            (_OF_RECORD, "--record-memory-history", args.record_memory_history),
        ):
            if spec.dest in names and spec.dest in context.given and not given:
                yield Problem(spec.name, f"{spec.name} belongs to {needed}: add it, or leave {spec.name} out.")


def profiler_has_something_to_profile(args: Arguments, context: Context) -> Iterator[Problem]:
    """Rollouts, ranks and parts of training that are there."""
    if not args.use_pytorch_profiler:
        return
    start, end = args.profile_step_start, args.profile_step_end
    if end <= start:
        yield Problem(
            "--profile-step-end",
            f"--profile-step-end {end} is not above --profile-step-start {start}: no rollout would be profiled.",
        )
    elif args.num_rollout is not None and start >= args.num_rollout:
        yield Problem(
            "--profile-step-start",
            f"--profile-step-start {start} is not below --num-rollout {args.num_rollout}: no rollout would be profiled;"
            " lower it.",
        )
    absent = [rank for rank in args.profile_ranks if not 0 <= rank < args.actor_num_gpus]
    if absent:
        yield Problem(
            "--profile-ranks",
            f"--profile-ranks {' '.join(map(str, absent))}: there are the ranks 0 to {args.actor_num_gpus - 1}.",
        )
    if "train_overall" in args.profile_target and len(set(args.profile_target)) > 1:
        yield Problem(
            "--profile-target",
            "--profile-target train_overall holds the other parts: give it alone, or the others without it.",
        )
    if args.debug_rollout_only:
        yield Problem(_PROFILER, f"{_PROFILER} profiles training and --debug-rollout-only has none: leave one out.")


def memory_record_has_training(args: Arguments, context: Context) -> Iterator[Problem]:
    """Allocations are those of training ranks."""
    if args.record_memory_history and args.debug_rollout_only:
        yield Problem(
            "--record-memory-history",
            "--record-memory-history is about training and --debug-rollout-only has none: leave one out.",
        )
