"""Flags of logs and metrics (TensorBoard, W&B, Prometheus), the timeline, profilers, dumps, replay and the dry run.

Also --custom-config-path, a file of flags, and the flags that run only training or only generation.
"""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class LoggingArguments:
    """Logs, metrics, run folder."""

    run_name: str = flag(None, "name of the run (date-time-process id)")
    runs_dir: str = flag("runs", "folder of all runs (path); this run writes to <runs dir>/<run name>")
    log_level: str = flag("INFO", "lowest level of logged lines", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    use_tensorboard: bool = flag(False, "write TensorBoard scalars")
    tensorboard_dir: str | None = flag(
        None, "folder for TensorBoard (path; <run folder>/tensorboard, or tensorboard_log with the two names below)"
    )
    tb_project_name: str | None = flag(None, "first folder level below the TensorBoard folder (none)")
    tb_experiment_name: str | None = flag(None, "second folder level below the TensorBoard folder (none)")
    timeline: bool = flag(
        True,
        "do not record a trace of every process (<run folder>/timeline.json.gz, for Perfetto)",
        negated=True,
        off=("--no-timeline",),
    )
    timeline_requests: int = flag(
        2048,
        "requests per rollout and per evaluation that the timeline shows individually; the same limit for rewards and"
        " for tool calls (count)",
        at_least=0,
    )
    custom_config_path: str | None = flag(
        None,
        "YAML file of flags (path), which override the command line; settings of custom hooks are under custom: and"
        " available as args.custom",
    )


@dataclasses.dataclass
class WandbArguments:
    """Weights & Biases, and optional statistics."""

    use_wandb: bool = flag(False, "log to Weights & Biases")
    wandb_mode: str | None = flag(
        None,
        "online: send; offline: keep for `wandb sync`; disabled: start nothing (WANDB_MODE, else online)",
        choices=("online", "offline", "disabled"),
    )
    wandb_dir: str | None = flag(None, "folder for W&B's files, in wandb/ below it (path; the run folder)")
    wandb_key: str | None = flag(
        None, "API key; never logged, but prefer WANDB_API_KEY (WANDB_API_KEY, else the key stored by wandb login)"
    )
    wandb_host: str | None = flag(None, "address of the service (URL; WANDB_BASE_URL, else https://api.wandb.ai)")
    wandb_team: str | None = flag(None, "team (entity) (your default entity)")
    wandb_group: str | None = flag(None, "group of runs, and name of the run (no group, named after the run folder)")
    wandb_project: str | None = flag(None, "project of the run (slimrl)")
    wandb_run_id: str | None = flag(
        None, "id of the run to continue (that of the run folder's summary, else a new run)"
    )
    wandb_random_suffix: bool = flag(
        True, "do not append the run's id to the group", negated=True, off=("--disable-wandb-random-suffix",)
    )
    wandb_always_use_train_step: bool = flag(
        False, "count optimizer steps on every x axis instead of rollouts, also in TensorBoard"
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
        None, "serve the run's metrics for Prometheus on this port of the driver (off)", at_least=1, at_most=65535
    )
    prometheus_host: str = flag(
        "127.0.0.1", "address that the port listens on; with 0.0.0.0 every machine that can connect reads all metrics"
    )


_PROFILE = "use --use-pytorch-profiler, or attach nsys or py-spy to a rank"


@dataclasses.dataclass
class ProfilingArguments:
    """Profilers."""

    use_pytorch_profiler: bool = flag(
        False, "profile training with torch's profiler, into <run folder>/profile (one trace per rank, rollout, part)"
    )
    profile: bool = flag(False, "mark the steps to profile for Nsight", not_served=_PROFILE)
    profile_step_start: int = flag(10, "first profiled rollout", at_least=0)
    profile_step_end: int = flag(12, "rollout before which profiling ends", at_least=1)
    profile_ranks: list[int] = flag([0], "profiled training ranks", nargs="+")
    profile_target: list[str] = flag(
        ["train_overall"],
        "profiled part of training: all of it, forward and backward passes with the optimizer step, or the"
        " log-probability passes",
        choices=("train_overall", "train_actor", "train_log_probs"),
        nargs="+",
    )
    record_memory_history: bool = flag(False, "record every GPU memory allocation of training")
    memory_recorder: str = flag(
        "torch",
        "recorder of memory allocations",
        choices=("torch", "memray"),
        not_served="--record-memory-history records the GPU's memory with torch; leave it out",
    )
    memory_snapshot_dir: str = flag(".", "folder of the records (path)")
    memory_snapshot_path: str = flag("snapshot.pickle", "file name of the record, prefixed with the rank (rank0-...)")
    memory_snapshot_num_steps: int | None = flag(
        None, "recorded rollouts (count; until training ends or runs out of memory)", at_least=1
    )
    manual_gc: bool = flag(
        False,
        "collect garbage at fixed steps only",
        not_served="training uses Python's automatic collection; leave it out",
    )
    manual_gc_interval: int = flag(0, "steps between two collections", not_served="it belongs to --manual-gc")


@dataclasses.dataclass
class DebugArguments:
    """Dumps and partial runs."""

    save_debug_rollout_data: str | None = flag(
        None, "write each rollout's samples to this path (contains {rollout_id}; {run_dir} is the run's folder)"
    )
    save_debug_rollout_limit: int | None = flag(
        None,
        "keep the newest N rollouts and the newest N evaluations of --save-debug-rollout-data (all)",
        at_least=1,
    )
    load_debug_rollout_data: str | None = flag(
        None, "train on recorded rollouts (path with {rollout_id}); implies --debug-train-only"
    )
    debug_train_only: bool = flag(
        False, "no engines: train on --load-debug-rollout-data, or on the rollouts of --rollout-function-path"
    )
    debug_rollout_only: bool = flag(False, "no training: only generate and score")
    dry_run: bool = flag(False, "check all flags, print the plan of the run with its memory, and exit")
    gpu_memory_gib: float | None = flag(
        None,
        "memory of one GPU for the plan of --dry-run (GiB; from nvidia-smi; without GPUs, the machine's memory"
        " divided by the logical GPUs)",
        above=0,
    )
    dry_run_resources: str | None = flag(
        None, "--dry-run also writes the nodes, GPUs and memory that the run needs to this JSON file (path)"
    )
    load_debug_rollout_data_subsample: float | None = flag(
        None,
        "train on this part of each recorded rollout, half of it from the front and half from the end (fraction; all)",
        above=0,
        at_most=1,
    )
    load_forge_rollout_data: str | None = flag(
        None,
        "like --load-debug-rollout-data, but with engines, weight updates and evaluations (path with {rollout_id})",
    )
    save_debug_train_data: str | None = flag(
        None,
        "write the training inputs of each rollout, such as log-probabilities, advantages, masks (path with"
        " {rollout_id})",
    )
    dump_details: str | None = flag(
        None,
        "folder of all dumps: --save-debug-rollout-data <folder>/rollout_data/{rollout_id}.jsonl,"
        " --save-debug-train-data <folder>/train_data/{rollout_id}.pt, and the tokenizer",
    )
    ci_test: bool = flag(
        False,
        "end the run if a training metric is implausible: not finite, engines and training far apart, or a nonzero KL"
        " at the first step",
    )
    ci_disable_kl_checker: bool = flag(False, "--ci-test without the KL check")
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1, "--ci-test: largest mean train_rollout_logprob_abs_diff of an optimizer step", above=0
    )
    ci_save_grad_norm: str | None = flag(
        None, "write the gradient norm of each optimizer step to this path (with {rollout_id} and {step_id})"
    )
    ci_load_grad_norm: str | None = flag(
        None, "end the run if a gradient norm differs by more than 1 % from the one that --ci-save-grad-norm wrote"
    )

    @property
    def replayed_rollouts(self) -> str | None:
        """The path template of the recorded rollouts to train on; None if the run generates rollouts."""
        return self.load_debug_rollout_data or self.load_forge_rollout_data
