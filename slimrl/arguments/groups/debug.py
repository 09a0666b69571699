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
    debug_train_only: bool = flag(
        False, "no engines: train on --load-debug-rollout-data, or on what --rollout-function-path makes"
    )
    debug_rollout_only: bool = flag(False, "no training: only generate and judge")
    dry_run: bool = flag(False, "check everything, print what would be started and how much memory it needs, and exit")
    slot_memory_gib: float | None = flag(
        None,
        "memory of one slot that --dry-run plans with (GiB; what nvidia-smi says, without GPUs the machine's by slots)",
        above=0,
    )
    load_debug_rollout_data_subsample: float | None = flag(
        None, "part of a replayed rollout (fraction; all)", not_served="a rollout is replayed whole; leave it out"
    )
    load_forge_rollout_data: str | None = flag(
        None, "replay rollouts with running engines", not_served="use --load-debug-rollout-data"
    )
    save_debug_train_data: str | None = flag(
        None, "write each training batch here", not_served="use --save-debug-rollout-data, which it is made from"
    )
    dump_details: str | None = flag(
        None, "folder for all dumps", not_served="use --save-debug-rollout-data <folder>/{rollout_id}.pt"
    )
    ci_test: bool = flag(
        False,
        "check a run's numbers while it runs",
        not_served="every number is in summary.json of the run folder; leave it out",
    )
    ci_disable_kl_checker: bool = flag(False, "without its check of the KL", not_served="it belongs to --ci-test")
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1, "its bound of train_rollout_logprob_abs_diff", not_served="it belongs to --ci-test"
    )
    ci_save_grad_norm: str | None = flag(
        None, "file for gradient norms", not_served="grad_norm of every step is in summary.json; leave it out"
    )
    ci_load_grad_norm: str | None = flag(
        None, "file of gradient norms to compare with", not_served="compare grad_norm of two runs' summary.json"
    )
