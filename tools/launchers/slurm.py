"""Slurm: one sbatch file; `srun` runs the recipe once on each node."""

from __future__ import annotations

import dataclasses
import shlex

from slimrl.processes.process_info import GIB
from tools.launchers.job import Job

# Before the time limit, for a run to end its processes and write its summary.
SIGNAL_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class SlurmOptions:
    """`time` is Slurm's limit (D-HH:MM:SS); `gpus_as` is how the cluster names GPUs: gpus-per-node or gres."""

    time: str
    partition: str | None = None
    account: str | None = None
    cpus: int | None = None
    gpus_as: str = "gpus-per-node"
    container: str | None = None  # image for pyxis, NVIDIA's container plugin of Slurm
    mounts_project: bool = False  # the checkout is not in the image
    extra: tuple[str, ...] = ()  # more #SBATCH words


def sbatch(job: Job, options: SlurmOptions) -> str:
    """The file for `sbatch`."""
    lines = ["#!/usr/bin/env bash"]
    lines += [f"#SBATCH {word}" for word in _directives(job, options)]
    lines += [
        f"# {job.name}: written by tools/launch.py. Submit with: sbatch {job.name}.sbatch",
        "set -euo pipefail",
        "",
        "# The token of the Ray cluster between the nodes, for this job alone, where all nodes can read it.",
        f"FOLDER={shlex.quote(job.base.rstrip('/'))}/.slimrl-jobs/$SLURM_JOB_ID",
        'mkdir -p -m 700 "$FOLDER"',
        "trap 'rm -rf -- \"$FOLDER\"' EXIT",
        "(umask 077; head -c 32 /dev/urandom | sha256sum | cut -d ' ' -f 1 >\"$FOLDER/ray_token\")",
        "export RAY_AUTH_TOKEN_PATH=$FOLDER/ray_token WORLD_SIZE=$SLURM_JOB_NUM_NODES",
        # Not through `head`: with pipefail, a list that is still being written would end the job.
        'mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "export MASTER_ADDR=${HOSTS[0]}",
        "cat >\"$FOLDER/node.sh\" <<'END_OF_NODE_SCRIPT'",
        job.node_script(["export RANK=$SLURM_PROCID"]).rstrip("\n"),
        "END_OF_NODE_SCRIPT",
        "",
        "# SLURM sends TERM before the time limit: the run ends in order, and the job is queued again to continue.",
        "STEP='' AGAIN=no",
        "end_in_time() {",
        "   AGAIN=yes",
        "   # srun itself would answer TERM with KILL.",
        '   scancel --signal=TERM "$SLURM_JOB_ID"',
        "}",
        "trap end_in_time TERM",
        "# --wait: the other nodes end this long after the first; --kill-on-bad-exit: at once if it fails.",
        " ".join(["srun", *_step_words(job, options), 'bash "$FOLDER/node.sh" &']),
        "STEP=$! CODE=0",
        'wait "$STEP" || CODE=$?',
        "# A signal ends `wait`, not the step.",
        'while kill -0 "$STEP" 2>/dev/null; do CODE=0; wait "$STEP" || CODE=$?; done',
        f"if [[ $AGAIN == yes && $CODE != 0 ]] && ((${{SLURM_RESTART_COUNT:-0}} < {job.max_restarts})); then",
        '   scontrol requeue "$SLURM_JOB_ID"',
        "elif [[ $AGAIN == yes && $CODE != 0 ]]; then",
        f'   echo "queued again {job.max_restarts} times already (--max-restarts): giving up" >&2',
        "fi",
        'exit "$CODE"',
    ]
    return "\n".join(lines) + "\n"


def _directives(job: Job, options: SlurmOptions) -> list[str]:
    resources = job.resources
    gpus = resources.gpus_per_node
    words = [
        f"--job-name={job.name}",
        f"--nodes={resources.nodes}",
        "--ntasks-per-node=1",
        f"--gpus-per-node={gpus}" if options.gpus_as == "gpus-per-node" else f"--gres=gpu:{gpus}",
        f"--mem={-(-resources.memory_bytes // GIB)}G",
        f"--time={options.time}",
        f"--signal=B:TERM@{SIGNAL_SECONDS}",
        "--requeue",  # a lost node ends the step; Slurm queues the job again, and it continues from the checkpoint
        "--open-mode=append",
        f"--output={job.base.rstrip('/')}/{job.name}-%j.log",
    ]
    for name in ("partition", "account"):
        if value := getattr(options, name):
            words.append(f"--{name}={value}")
    words += [f"--cpus-per-task={options.cpus}"] if options.cpus is not None else ["--exclusive"]
    return [*words, *options.extra]


def _step_words(job: Job, options: SlurmOptions) -> list[str]:
    words = ["--kill-on-bad-exit=1", f"--wait={job.rejoin_timeout_s + 60}", "--label"]
    # A step does not inherit the job's CPUs: without this it would run on one core of each node.
    words += ['--cpus-per-task="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}"', "--cpu-bind=none"]
    if options.container:
        mounts = [job.base, *([job.project] if job.project and options.mounts_project else [])]
        shown = ",".join(f"{path}:{path}" for path in mounts)  # BASE has the job's own folder too
        words += [f"--container-image={shlex.quote(options.container)}", f"--container-mounts={shlex.quote(shown)}"]
    return words
