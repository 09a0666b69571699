"""Rules about --rollout-engine, its flags and what vLLM's servers cannot do, and about the ways of weight updates.

The ways of a weight update are broadcast, files, changes, and point to point.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from slimrl.arguments.flag import Problem
from slimrl.arguments.namespace import Arguments, Context
from slimrl.arguments.validation.engines.servers import SIZES

_ENGINE, _PYTHON, _EXTERNAL = "--rollout-engine", "--vllm-python", "--rollout-external-engine-addrs"


def engine_flags_are_those_of_the_engine(args: Arguments, context: Context) -> Iterator[Problem]:
    """--vllm-* flags are for vLLM's servers, --sglang-* flags that pass through for SGLang's."""
    if "rollout_engine" in context.broken:
        return
    other, options = ("vllm", args.vllm_options) if args.rollout_engine == "sglang" else ("sglang", args.sglang_options)
    of_external = {"api_key"} if args.rollout_external_engine_addrs else set()
    flags = [f"--{other}-{name.replace('_', '-')}" for name in options if name not in of_external]
    if other == "vllm" and args.vllm_python is not None:
        flags.append(_PYTHON)
    for flag in flags:
        yield Problem(
            flag,
            f"{flag} is for {other} servers, and {_ENGINE} is {args.rollout_engine}: leave one of them out.",
        )


def vllm_has_an_interpreter(args: Arguments, context: Context) -> Iterator[Problem]:
    """--vllm-python is a program; without it this environment has vllm."""
    if not args.uses_vllm or args.debug_train_only or "vllm_python" in context.broken:
        return
    if args.rollout_external_engine_addrs:
        if args.vllm_python is not None:
            yield Problem(
                _PYTHON,
                f"{_PYTHON} is for servers that slimrl starts, and {_EXTERNAL} names external ones: leave it out.",
            )
        return
    if (python := args.vllm_python) is None:
        if importlib.util.find_spec("vllm") is None:
            yield Problem(
                _PYTHON,
                f"{_ENGINE} vllm needs vllm, which this environment does not have: give {_PYTHON}, the interpreter of"
                " one that has.",
            )
    elif not os.access(python, os.X_OK) or Path(python).is_dir():
        yield Problem(_PYTHON, f"{_PYTHON} {python} is not a program: give the path of a Python interpreter.")


def vllm_serves_the_run(args: Arguments, context: Context) -> Iterator[Problem]:
    """Nothing is asked of vLLM's servers that they cannot do."""
    if not args.uses_vllm or args.debug_train_only:
        return
    updates = not args.debug_rollout_only and not args.eval_only
    for given, flag, reason in (
        (args.check_weight_update_equal, "--check-weight-update-equal", "vLLM servers report no checksums"),
        (updates and args.update_weight_mode == "delta", "--update-weight-mode delta", "vLLM servers load all weights"),
        (args.prometheus_port is not None, "--prometheus-port", "the run's key protects the metrics of vLLM servers"),
    ):
        if given:
            yield Problem(flag.split()[0], f"{_ENGINE} vllm excludes {flag}, because {reason}: leave {flag} out.")
    if args.engines_have_adapters:
        yield Problem(
            "--lora-rank", f"{_ENGINE} vllm with --lora-rank sends the engines merged weights: add --lora-merge."
        )
    known = not context.broken & {"rollout_num_gpus_per_engine", "num_gpus_per_node"}
    if known and args.rollout_num_gpus_per_engine > args.num_gpus_per_node:
        yield Problem(
            "--rollout-num-gpus-per-engine",
            f"--rollout-num-gpus-per-engine {args.rollout_num_gpus_per_engine} is more than the GPUs of a node"
            f" (--num-gpus-per-node {args.num_gpus_per_node}), and a vLLM server has one node: lower it.",
        )
    replicas = args.vllm_options.get("data_parallel_size", 1)
    if known and (replicas < 1 or args.rollout_num_gpus_per_engine % replicas):
        yield Problem(
            "--vllm-data-parallel-size",
            f"--vllm-data-parallel-size {replicas} does not divide --rollout-num-gpus-per-engine"
            f" {args.rollout_num_gpus_per_engine}, the GPUs of all replicas of an engine: choose a divisor.",
        )
    if not updates or {"rollout_top_p", "rollout_top_k"} & context.broken:
        return
    for flag, value, off in (("--rollout-top-p", args.rollout_top_p, 1), ("--rollout-top-k", args.rollout_top_k, -1)):
        if value != off:
            yield Problem(
                flag,
                f"{flag} {value:g} limits the tokens, of which vLLM reports renormalised log-probabilities; those of"
                f" training are of all tokens: leave {flag} out, or use {_ENGINE} sglang.",
            )


_P2P, _MOONCAKE = "--update-weight-transfer-mode p2p", "--update-weight-transport mooncake"
_OTHER_SIZES = [(flag, name) for flag, name in SIZES.items() if name != "pp_size"]  # which no broadcast supports
# kernels for which SGLang permutes or exchanges the weights of experts
_OWN_LAYOUT = ("flashinfer", "triton_kernel", "aiter")


def _updates_engines(args: Arguments, context: Context) -> bool:
    return context.is_training and not args.debug_train_only and not args.debug_rollout_only


def disk_transport_has_a_folder(args: Arguments, context: Context) -> Iterator[Problem]:
    """The disk transport has a folder, and only the disk transport has one."""
    if args.update_weight_transport == "disk" and args.update_weight_disk_dir is None:
        yield Problem(
            "--update-weight-disk-dir", "--update-weight-transport disk needs --update-weight-disk-dir: give a folder."
        )
    if args.update_weight_transport != "disk" and args.update_weight_disk_dir is not None:
        yield Problem(
            "--update-weight-disk-dir",
            f"--update-weight-disk-dir {args.update_weight_disk_dir} is used by --update-weight-transport disk only:"
            " add it, or leave the folder out.",
        )


def delta_updates_fit_the_run(args: Arguments, context: Context) -> Iterator[Problem]:
    """--update-weight-mode delta sends changes to engines of the run that keep their weights."""
    if args.update_weight_mode != "delta" or not _updates_engines(args, context):
        return
    flag = "--update-weight-mode delta"
    for given, other, reason in (
        (
            args.colocate and args.update_weight_transport == "disk",
            "--colocate with --update-weight-transport disk",
            "needs no files of changes, because the engines reach the trainer's memory",
        ),
        (
            args.colocate and args.update_weight_transport != "disk" and args.offload_rollout,
            "--offload-rollout (without --no-offload-rollout on with --colocate)",
            "gives up the engines' weights while training runs",
        ),
        (
            args.colocate and args.sglang_options.get("pp_size", 1) > 1,
            "--sglang-pp-size",
            "has stages that answer before they have the changes",
        ),
        (args.update_weight_transfer_mode == "p2p", _P2P, "compares nothing with the last update"),
        (args.engines_have_adapters, "--lora-rank", "without --lora-merge sends nothing but the adapters"),
        (args.rollout_external_engine_addrs, _EXTERNAL, "has servers without slimrl's loader"),
    ):
        if given:
            yield Problem("--update-weight-mode", f"{other} {reason}, and {flag} sends changes: leave one of them out.")
    if not (args.bf16 or args.fp16):
        yield Problem(
            "--update-weight-mode",
            f"{flag} saves nothing in float32, in which every step changes every weight: add --bf16, or leave it out.",
        )


_LOCAL, _ENCODING, _CHECKSUM = (
    "--update-weight-local-checkpoint-dir",
    "--update-weight-delta-encoding",
    "--update-weight-delta-checksum",
)


def delta_files_have_a_checkpoint(args: Arguments, context: Context) -> Iterator[Problem]:
    """Changes in files have a local checkpoint to change; its folder, encoding and checksum are theirs alone."""
    delta, disk = args.update_weight_mode == "delta", args.update_weight_transport == "disk"
    local = args.update_weight_local_checkpoint_dir
    checksum, encoding = args.update_weight_delta_checksum, args.update_weight_delta_encoding
    files = "--update-weight-mode delta with --update-weight-transport disk"
    if not (delta and disk):
        for given, flag in (
            (local is not None, f"{_LOCAL} {local}"),
            (encoding == "xor", f"{_ENCODING} xor"),
            (checksum != "xxh3-128", f"{_CHECKSUM} {checksum}"),
        ):
            if given:
                yield Problem(flag.split()[0], f"{flag} is used by {files} only: add both, or leave it out.")
    elif local is None:
        yield Problem(
            _LOCAL,
            f"{files} changes a checkpoint on each engine's host: give its folder, {_LOCAL}, on a disk with room for"
            " the model.",
        )
    elif args.update_weight_disk_dir is not None:
        one, other = Path(local).resolve(), Path(args.update_weight_disk_dir).resolve()
        if one == other or one in other.parents or other in one.parents:
            yield Problem(
                _LOCAL,
                f"{_LOCAL} {local} and --update-weight-disk-dir {args.update_weight_disk_dir} contain one another: the"
                " one is on each engine's host, the other shared; choose another folder.",
            )
    if checksum == "blake3" and importlib.util.find_spec("blake3") is None:
        yield Problem(
            _CHECKSUM,
            f"{_CHECKSUM} blake3 needs the package blake3, which this environment does not have: install it here and"
            " for the engines, or use xxh3-128.",
        )


def p2p_updates_fit_the_run(args: Arguments, context: Context) -> Iterator[Problem]:
    """--update-weight-transfer-mode p2p sends shards to SGLang servers of the run, on GPUs of their own."""
    p2p = args.update_weight_transfer_mode == "p2p"
    if args.update_weight_transport == "mooncake" and not p2p:
        yield Problem(
            "--update-weight-transport",
            f"{_MOONCAKE} moves weights between pairs of ranks, which {_P2P} does: add it, or leave mooncake out.",
        )
    if not p2p or not _updates_engines(args, context):
        return
    for given, other, reason in (
        (args.colocate, "--colocate", "has engines that read the weights in the trainer's memory"),
        (args.update_weight_transport == "disk", "--update-weight-transport disk", "writes files"),
        (args.engines_have_adapters, "--lora-rank", "without --lora-merge sends nothing but the adapters"),
        (args.rollout_external_engine_addrs, _EXTERNAL, "has servers without slimrl's loader"),
        (args.use_megatron_fsdp, "--use-megatron-fsdp", "divides tensors anywhere in their rows"),
        (args.uses_vllm, "--rollout-engine vllm", "has servers that take whole weights"),
    ):
        if given:
            yield Problem(
                "--update-weight-transfer-mode",
                f"{other} {reason}, and {_P2P} sends each trainer shard to the ranks of SGLang servers on other GPUs:"
                " leave one of them out.",
            )


def p2p_knows_the_layout_of_engines(args: Arguments, context: Context) -> Iterator[Problem]:
    """With --update-weight-transfer-mode p2p the trainer must know which rank of an engine has which elements."""
    if args.update_weight_transfer_mode != "p2p" or not _updates_engines(args, context) or args.server_models:
        return
    options = args.sglang_options
    runner = options.get("moe_runner_backend") or "auto"
    for given, flag, reason in (
        *(
            (options.get(name, 1) > 1, flag, "divides an engine in other ways than tensors")
            for flag, name in _OTHER_SIZES
        ),
        (options.get("speculative_algorithm"), "--sglang-speculative-algorithm", "adds a draft model"),
        (
            runner.startswith(_OWN_LAYOUT),
            f"--sglang-moe-runner-backend {runner}",
            "stores experts in a layout of its own",
        ),
        (
            (options.get("moe_a2a_backend") or "none") != "none",
            "--sglang-moe-a2a-backend",
            "moves experts between ranks",
        ),
    ):
        if given:
            yield Problem(
                flag.split()[0],
                f"{flag} {reason}, which {_P2P} does not know: leave one of them out.",
            )


# kernels for which SGLang 0.5.20 permutes the weights of experts once, after the model is loaded
_PERMUTES_ONCE = ("flashinfer_trtllm", "flashinfer_trtllm_routed", "experimental_sgl_trtllm")


def experts_keep_the_layout_of_updates(args: Arguments, context: Context) -> Iterator[Problem]:
    """Weight updates find the experts of SGLang's servers as they send them."""
    runner = args.sglang_options.get("moe_runner_backend")
    p2p = args.update_weight_transfer_mode == "p2p"  # another rule reports it
    if runner not in _PERMUTES_ONCE or p2p or not _updates_engines(args, context):
        return
    yield Problem(
        "--sglang-moe-runner-backend",
        f"--sglang-moe-runner-backend {runner} permutes the weights of experts when they are loaded, and the first"
        " weight update fails: use triton, or leave it out.",
    )
