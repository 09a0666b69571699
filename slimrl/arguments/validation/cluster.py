"""Rules about GPUs and offloading: GPUs of each side, nodes, and the sides that can be offloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator

from slimrl.arguments.flag import Problem
from slimrl.arguments.namespace import Arguments, Context

_PER_ENGINE = "--rollout-num-gpus-per-engine"
ACTOR_FIELDS = {"actor_num_nodes", "actor_num_gpus_per_node"}


def training_gpus_fit_the_node(args: Arguments, context: Context) -> Iterator[Problem]:
    """Training uses no more GPUs per node than a node has."""
    value = args.actor_num_gpus_per_node
    if {"num_gpus_per_node", "actor_num_gpus_per_node"} & context.broken or value <= args.num_gpus_per_node:
        return
    yield Problem(
        "--actor-num-gpus-per-node",
        f"--actor-num-gpus-per-node {value} is more than the --num-gpus-per-node {args.num_gpus_per_node} of a node:"
        " lower it, or raise --num-gpus-per-node.",
    )


def rollout_has_gpus(args: Arguments, context: Context) -> Iterator[Problem]:
    """Split placement sets --rollout-num-gpus; colocated placement uses the training GPUs."""
    if context.broken & (ACTOR_FIELDS | {"rollout_num_gpus"}) or args.debug_train_only:
        return
    if args.rollout_num_gpus is None:
        yield Problem(
            "--rollout-num-gpus",
            "the engines have no GPUs: give --rollout-num-gpus (separate GPUs) or --colocate (shared GPUs).",
        )


def async_excludes_colocate(args: Arguments, context: Context) -> Iterator[Problem]:
    """train_async.py needs separate GPUs for both sides."""
    if context.entry == "train_async.py" and args.colocate:
        yield Problem(
            "--colocate",
            "--colocate alternates training and generation, and train_async.py runs them concurrently: give"
            " --rollout-num-gpus instead, or start train.py.",
        )
    if context.entry == "train.py" and args.update_weights_interval != 1:
        yield Problem(
            "--update-weights-interval",
            f"--update-weights-interval {args.update_weights_interval} belongs to train_async.py; train.py updates"
            " weights after every rollout: leave it out.",
        )


def plan_flags_belong_to_dry_run(args: Arguments, context: Context) -> Iterator[Problem]:
    """--gpu-memory-gib and --dry-run-resources are for the plan only; a run measures the memory."""
    if args.dry_run:
        return
    for flag, value in (
        ("--gpu-memory-gib", None if args.gpu_memory_gib is None else f"{args.gpu_memory_gib:g}"),
        ("--dry-run-resources", args.dry_run_resources),
    ):
        if value is not None:
            yield Problem(flag, f"{flag} {value} is used by --dry-run only: add --dry-run, or leave it out.")


def worker_environment_is_text(args: Arguments, context: Context) -> Iterator[Problem]:
    """Values of environment variables are strings, as Ray requires."""
    for name, value in args.train_env_vars.items():
        if not isinstance(value, str):
            shown = json.dumps(value)
            yield Problem(
                "--train-env-vars",
                f"--train-env-vars has {name} {shown}, which is not text: write {json.dumps(name)}:"
                f" {json.dumps(shown)}.",
            )


# deterministic values of a rank's environment variables; --deterministic-mode sets the first
_DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),
}


def deterministic_mode_is_not_undone(args: Arguments, context: Context) -> Iterator[Problem]:
    """--train-env-vars does not override the variables of --deterministic-mode with nondeterministic values."""
    for name, values in _DETERMINISTIC.items():
        given = args.train_env_vars.get(name)
        if args.deterministic_mode and given is not None and given not in values:
            yield Problem(
                "--train-env-vars",
                f"--train-env-vars has {name} {given}, which allows nondeterministic kernels: --deterministic-mode sets"
                f" {values[0]}; leave {name} or --deterministic-mode out.",
            )


def train_env_sets_no_visible_devices(args: Arguments, context: Context) -> Iterator[Problem]:
    """Every rank uses the GPU that Ray reserved for it."""
    if "CUDA_VISIBLE_DEVICES" in args.train_env_vars:
        yield Problem(
            "--train-env-vars",
            "--train-env-vars has CUDA_VISIBLE_DEVICES, and Ray assigns one GPU to every rank: leave it out; to use"
            " fewer GPUs of a node, set it for ray start.",
        )


def debug_only_flags_exclude_each_other(args: Arguments, context: Context) -> Iterator[Problem]:
    """At most one side is left out, and training alone has rollouts to train on."""
    if args.debug_train_only and args.debug_rollout_only:
        why = " (implied by --load-debug-rollout-data)" if args.load_debug_rollout_data is not None else ""
        yield Problem(
            "--debug-train-only", f"--debug-train-only{why} and --debug-rollout-only leave nothing to run: give one."
        )
    if args.debug_train_only and args.load_debug_rollout_data is None and not args.has_custom_rollout_function:
        yield Problem(
            "--debug-train-only",
            "--debug-train-only needs rollouts to train on: give --load-debug-rollout-data, or a"
            " --rollout-function-path that needs no engines.",
        )


def offload_is_synchronous(args: Arguments, context: Context) -> Iterator[Problem]:
    """A side can be offloaded only while it is idle."""
    if context.entry != "train_async.py" or args.colocate:  # with --colocate that is the cause
        return
    for flag, on in (("--offload-train", args.offload_train), ("--offload-rollout", args.offload_rollout)):
        if on:
            yield Problem(
                flag,
                f"{flag} offloads a side while the other works, and with train_async.py both work concurrently: leave"
                f" it"
                " out, or start train.py.",
            )
            return


def offload_is_said_once(args: Arguments, context: Context) -> Iterator[Problem]:
    """--offload and --no-offload-... do not contradict each other."""
    kept = [name for name in ("offload_train", "offload_rollout") if name in context.given and not vars(args)[name]]
    absent = args.debug_train_only or args.debug_rollout_only
    if args.offload and kept and not absent:
        flag = "--no-" + kept[0].replace("_", "-")
        yield Problem(
            "--offload", f"--offload offloads both sides and {flag} leaves one out: give one of the two flags."
        )


def elastic_engines_have_gpus_of_their_own(args: Arguments, context: Context) -> Iterator[Problem]:
    """--rollout-max-num-gpus is for whole engines on separate GPUs of one node each, and needs fault tolerance."""
    most, flag, external = args.rollout_max_num_gpus, "--rollout-max-num-gpus", "--rollout-external-engine-addrs"
    if most is None or "rollout_max_num_gpus" in context.broken:
        return
    for other, given, fix in (
        ("--use-fault-tolerance", args.use_fault_tolerance, "add it"),
        ("engines on separate GPUs", not args.colocate, "leave --colocate out"),
        ("engines that keep their memory", not args.offload_rollout, "leave --offload-rollout out"),
        ("engines that the run starts", not args.rollout_external_engine_addrs, f"leave {external} out"),
        ("engines", not args.debug_train_only, "leave --debug-train-only out"),
    ):
        if not given:
            yield Problem(flag, f"{flag} {most} needs {other}: {fix}, or leave {flag} out.")
    unknown = context.broken & {"rollout_num_gpus", "rollout_num_gpus_per_engine", "num_gpus_per_node"}
    if unknown or args.rollout_num_gpus is None or args.rollout_external_engine_addrs:
        return
    own, per_engine = args.rollout_num_gpus, args.rollout_num_gpus_per_engine
    if most <= own or (most - own) % per_engine:
        yield Problem(
            flag,
            f"{flag} {most} is not --rollout-num-gpus {own} and the GPUs of one or more engines ({_PER_ENGINE}"
            f" {per_engine}): give {own + per_engine}, for instance.",
        )
    if per_engine > args.num_gpus_per_node:
        yield Problem(
            flag,
            f"{flag} {most}: an engine of {_PER_ENGINE} {per_engine} is on several nodes (--num-gpus-per-node"
            f" {args.num_gpus_per_node}) and cannot join a running job: lower {_PER_ENGINE}, or leave {flag} out.",
        )
