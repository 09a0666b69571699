"""Flags of logs and metrics (TensorBoard, W&B, Prometheus), the timeline, profilers, dumps, replay and the dry run.

Also --custom-config-path, a file of flags, and the flags that run one side alone.
"""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class LoggingArguments:
    """What is written down and where."""

    run_name: str = flag(None, "name of the run (date-time-process id)")
    runs_dir: str = flag("runs", "folder of all runs (path); this run writes to <runs dir>/<run name>")
    log_level: str = flag("INFO", "least important log line shown", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    use_tensorboard: bool = flag(False, "write TensorBoard scalars")
    tensorboard_dir: str | None = flag(
        None, "folder for TensorBoard (path; <run folder>/tensorboard, or tensorboard_log with the two names below)"
    )
    tb_project_name: str | None = flag(None, "first folder level below the TensorBoard folder (none)")
    tb_experiment_name: str | None = flag(None, "second folder level below the TensorBoard folder (none)")
    timeline: bool = flag(
        True,
        "do not record what every process does when (<run folder>/timeline.json.gz, for Perfetto)",
        negated=True,
        off=("--no-timeline",),
    )
    timeline_requests: int = flag(
        2048,
        "requests of each rollout and of each evaluation that the timeline shows one by one, and likewise rewards and"
        " tool calls (count of each)",
        at_least=0,
    )
    custom_config_path: str | None = flag(
        None,
        "YAML file of flags (path), which win over the command line; settings of your own hooks are in it under"
        " custom: and reach them as args.custom",
    )


@dataclasses.dataclass
class WandbArguments:
    """Weights & Biases, and statistics on demand."""

    use_wandb: bool = flag(False, "log to Weights & Biases")
    wandb_mode: str | None = flag(
        None,
        "send (online), keep for `wandb sync` (offline), or start nothing (disabled) (WANDB_MODE, else online)",
        choices=("online", "offline", "disabled"),
    )
    wandb_dir: str | None = flag(None, "folder below which its files are in wandb/ (path; the run folder)")
    wandb_key: str | None = flag(
        None, "key to log in with; shown nowhere, but better given as WANDB_API_KEY (that, or what wandb login stored)"
    )
    wandb_host: str | None = flag(None, "address of the service (URL; WANDB_BASE_URL, else https://api.wandb.ai)")
    wandb_team: str | None = flag(None, "team (entity) (your own)")
    wandb_group: str | None = flag(None, "group of runs, and name of the run (the name is that of the run folder)")
    wandb_project: str | None = flag(None, "project of the run (slimrl)")
    wandb_run_id: str | None = flag(
        None, "run to continue (a resumed run continues the one that its folder's summary names; else a new one)"
    )
    wandb_random_suffix: bool = flag(
        True, "do not append the run's id to the group", negated=True, off=("--disable-wandb-random-suffix",)
    )
    wandb_always_use_train_step: bool = flag(
        False, "optimizer steps on every horizontal axis, of TensorBoard too, instead of rollouts"
    )
    log_multi_turn: bool = flag(False, "statistics of turns (multi_turn/)")
    log_passrate: bool = flag(False, "pass@k of each rollout (passrate/)")
    log_reward_category: str | None = flag(
        None, "entry of a reward dict: the share of samples by its value is logged (rollout/error_cat/)"
    )
    log_correct_samples: bool = flag(False, "lengths and entropy of the samples with reward 1 or more")


@dataclasses.dataclass
class PrometheusArguments:
    """Prometheus."""

    prometheus_port: int | None = flag(
        None, "offer the run's metrics to Prometheus on this port of the driver (off)", at_least=1, at_most=65535
    )
    prometheus_host: str = flag(
        "127.0.0.1", "address that the port listens on; 0.0.0.0 lets other machines scrape it, who then see everything"
    )


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
    gpu_memory_gib: float | None = flag(
        None,
        "memory of one GPU that --dry-run plans with (GiB; what nvidia-smi says, without GPUs the machine's by GPUs)",
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
        "like --load-debug-rollout-data, with the engines running: weights are updated and evaluations made (path with"
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
