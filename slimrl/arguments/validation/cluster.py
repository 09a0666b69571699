"""Rules about GPUs and offloading: how many each side gets, how training divides them, which side can be offloaded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from slimrl.arguments.flag import Problem
from slimrl.arguments.namespace import Arguments
from slimrl.arguments.validation.rule import Context

_ACTOR_FIELDS = {"actor_num_nodes", "actor_num_gpus_per_node"}


def _training_gpus(args: Arguments) -> str:
    return (
        f"--actor-num-nodes {args.actor_num_nodes} x --actor-num-gpus-per-node {args.actor_num_gpus_per_node}"
        f" = {args.actor_num_gpus}"
    )


def world_divides_by_model_gpus(args: Arguments, context: Context) -> Iterator[Problem]:
    """Training GPUs = data x tensor x pipeline x context parallel size, and the same for the experts' layout."""
    axes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    experts = ("expert_tensor_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size")
    if args.debug_rollout_only or context.broken & {*_ACTOR_FIELDS, *axes, *experts}:
        return
    for names in (axes, experts) if args.num_experts is not None else (axes,):
        sizes = {name: vars(args)[name] or 1 for name in names}
        used = {name: size for name, size in sizes.items() if size > 1}
        product = math.prod(used.values())
        if args.actor_num_gpus % product:
            shown = " x ".join(f"--{name.replace('_', '-')} {size}" for name, size in used.items())
            several = len(used) > 1
            total = f" = {product}" if several else ""
            fix = "choose sizes whose product divides them" if several else "choose a divisor"
            yield Problem(
                "--" + next(iter(used)).replace("_", "-"),
                f"{_training_gpus(args)} training GPUs do not divide by {shown}{total}: {fix}.",
            )


def context_parallelism_has_one_level(args: Arguments, context: Context) -> Iterator[Problem]:
    """What exchanges keys and values on two levels has no sizes for them."""
    if "a2a+p2p" in (args.cp_comm_type or []):
        yield Problem(
            "--cp-comm-type",
            "--cp-comm-type a2a+p2p needs two levels of context parallelism and one is served: use p2p, all_gather or"
            " a2a.",
        )


def model_divides_by_tensor_parallel(args: Arguments, context: Context) -> Iterator[Problem]:
    """Heads, key/value heads, both widths and the padded vocabulary are cut into equal parts."""
    tp = args.tensor_model_parallel_size
    if "tensor_model_parallel_size" in context.broken:
        return
    values = vars(args)
    names = ("num_attention_heads", "num_query_groups", "hidden_size", "ffn_hidden_size", "padded_vocab_size")
    for name in names:
        value = values[name]
        if value is not None and value % tp and name not in context.broken:
            flag = "--" + name.replace("_", "-")
            yield Problem(
                flag,
                f"{flag} {value} does not divide by --tensor-model-parallel-size {tp}:"
                " choose a tensor parallel size that divides it.",
            )


def training_gpus_fit_the_node(args: Arguments, context: Context) -> Iterator[Problem]:
    """Training asks for no more GPUs on a node than the node has."""
    value = args.actor_num_gpus_per_node
    if {"num_gpus_per_node", "actor_num_gpus_per_node"} & context.broken or value <= args.num_gpus_per_node:
        return
    yield Problem(
        "--actor-num-gpus-per-node",
        f"--actor-num-gpus-per-node {value} is more than the --num-gpus-per-node {args.num_gpus_per_node} of a node:"
        " lower it, or say how many GPUs a node has.",
    )


def rollout_has_gpus(args: Arguments, context: Context) -> Iterator[Problem]:
    """Split placement names its GPUs; colocated placement has the training GPUs."""
    if context.broken & (_ACTOR_FIELDS | {"rollout_num_gpus"}) or args.debug_train_only:
        return
    if args.rollout_num_gpus is None:
        yield Problem(
            "--rollout-num-gpus",
            "the engines have no GPUs: give --rollout-num-gpus (GPUs of their own) or --colocate (shared GPUs).",
        )


def async_is_split(args: Arguments, context: Context) -> Iterator[Problem]:
    """One-step off-policy needs GPUs for both sides at once."""
    if context.entry == "train_async.py" and args.colocate:
        yield Problem(
            "--colocate",
            "--colocate lets training and generation take turns, and train_async.py runs them at once:"
            " give --rollout-num-gpus instead, or start train.py.",
        )
    if context.entry == "train.py" and args.update_weights_interval != 1:
        yield Problem(
            "--update-weights-interval",
            f"--update-weights-interval {args.update_weights_interval} belongs to train_async.py; train.py updates"
            " weights after every rollout: leave it out.",
        )


def gpu_memory_is_planned_with(args: Arguments, context: Context) -> Iterator[Problem]:
    """The memory of a GPU is a number for the plan; a run finds out by itself."""
    if args.gpu_memory_gib is not None and not args.dry_run:
        yield Problem(
            "--gpu-memory-gib",
            f"--gpu-memory-gib {args.gpu_memory_gib:g} is what --dry-run plans with: add it, or leave this out.",
        )


def worker_environment_is_text(args: Arguments, context: Context) -> Iterator[Problem]:
    """Environment variables hold text, and Ray takes nothing else."""
    for name, value in args.train_env_vars.items():
        if not isinstance(value, str):
            shown = json.dumps(value)
            yield Problem(
                "--train-env-vars",
                f"--train-env-vars has {name} {shown}, which is not text: write {json.dumps(name)}:"
                f" {json.dumps(shown)}.",
            )


# what --deterministic-mode needs of a rank's environment: variable -> values that keep it, the first is set by itself
_DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),
}


def deterministic_mode_is_not_undone(args: Arguments, context: Context) -> Iterator[Problem]:
    """Variables of the training processes win over what --deterministic-mode sets."""
    for name, values in _DETERMINISTIC.items():
        given = args.train_env_vars.get(name)
        if args.deterministic_mode and given is not None and given not in values:
            yield Problem(
                "--train-env-vars",
                f"--train-env-vars has {name} {given}, with which kernels are free to differ from run to run:"
                f" --deterministic-mode sets {values[0]} by itself, leave {name} or the mode out.",
            )


def placement_chooses_the_gpus(args: Arguments, context: Context) -> Iterator[Problem]:
    """Every rank is given the GPU that Ray reserved for it."""
    if "CUDA_VISIBLE_DEVICES" in args.train_env_vars:
        yield Problem(
            "--train-env-vars",
            "--train-env-vars has CUDA_VISIBLE_DEVICES, and every rank sees the GPU that Ray reserved for it: leave it"
            " out; set it where Ray is started to keep Ray off some GPUs.",
        )


def only_one_side_is_left_out(args: Arguments, context: Context) -> Iterator[Problem]:
    """Debugging one side alone."""
    if args.debug_train_only and args.debug_rollout_only:
        why = " (implied by --load-debug-rollout-data)" if args.load_debug_rollout_data is not None else ""
        yield Problem(
            "--debug-train-only", f"--debug-train-only{why} and --debug-rollout-only leave nothing to run: give one."
        )
    if args.debug_train_only and args.load_debug_rollout_data is None and not args.has_own_rollout_function:
        yield Problem(
            "--debug-train-only",
            "--debug-train-only needs rollouts to train on: give --load-debug-rollout-data, or a"
            " --rollout-function-path that needs no engines.",
        )


def offloaded_sides_take_turns(args: Arguments, context: Context) -> Iterator[Problem]:
    """A side can leave its memory only while it has nothing to do."""
    if context.entry != "train_async.py" or args.colocate:  # with --colocate that is the cause
        return
    for flag, on in (("--offload-train", args.offload_train), ("--offload-rollout", args.offload_rollout)):
        if on:
            yield Problem(
                flag,
                f"{flag} lets a side leave its memory while the other works, and with train_async.py both work at once:"
                " leave it out, or start train.py.",
            )
            return


def offload_is_said_once(args: Arguments, context: Context) -> Iterator[Problem]:
    """--offload means both sides."""
    kept = [name for name in ("offload_train", "offload_rollout") if name in context.given and not vars(args)[name]]
    absent = args.debug_train_only or args.debug_rollout_only
    if args.offload and kept and not absent:
        flag = "--no-" + kept[0].replace("_", "-")
        yield Problem("--offload", f"--offload is both sides and {flag} leaves one out: give one of the two flags.")
