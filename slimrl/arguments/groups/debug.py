"""Flags for looking into a run: dumps, replay, one side alone, the plan of a run that is not started."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class DebugArguments:
    """Dumps and partial runs."""

    save_debug_rollout_data: str | None = flag(
        None, "write each rollout's samples here (path with {rollout_id} in it; {run_dir} is the run's folder)"
    )
    save_debug_rollout_limit: int | None = flag(
        None,
        "keep that many newest rollouts of --save-debug-rollout-data, and as many evaluations (all)",
        at_least=1,
    )
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
        None,
        "train on this part of each recorded rollout only, half of it from the front and half from the end (fraction;"
        " all of it)",
        above=0,
        at_most=1,
    )
    load_forge_rollout_data: str | None = flag(
        None,
        "like --load-debug-rollout-data, with the engines running: weights are pushed and evaluations made (path with"
        " {rollout_id} in it)",
    )
    save_debug_train_data: str | None = flag(
        None,
        "write what each rollout is trained on here: log-probabilities, advantages, masks (path with {rollout_id} in"
        " it)",
    )
    dump_details: str | None = flag(
        None,
        "folder for everything: --save-debug-rollout-data <folder>/rollout_data/{rollout_id}.jsonl,"
        " --save-debug-train-data <folder>/train_data/{rollout_id}.pt, and the tokenizer",
    )
    ci_test: bool = flag(
        False,
        "end the run where a number of training cannot be right: not finite, engines and training far apart, or a KL at"
        " the first step",
    )
    ci_disable_kl_checker: bool = flag(False, "--ci-test without its check of the KL")
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1, "--ci-test: largest mean train_rollout_logprob_abs_diff of an optimizer step", above=0
    )
    ci_save_grad_norm: str | None = flag(
        None, "write the gradient norm of each optimizer step here (path with {rollout_id} and {step_id} in it)"
    )
    ci_load_grad_norm: str | None = flag(
        None, "end the run where a gradient norm is 1 % away from what --ci-save-grad-norm wrote here"
    )

    @property
    def replayed_rollouts(self) -> str | None:
        """The template of recorded rollouts that are trained on; None where rollouts are made."""
        return self.load_debug_rollout_data or self.load_forge_rollout_data
