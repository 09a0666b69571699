"""Rules about the ways of weight updates: files, changes, and point to point."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.flag import Problem
from slimrl.arguments.namespace import Arguments, Context
from slimrl.arguments.validation.engines.servers import SIZES

_EXTERNAL = "--rollout-external-engine-addrs"
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
    """--update-weight-mode delta sends changes to engines of the run, on GPUs of their own."""
    if args.update_weight_mode != "delta" or not _updates_engines(args, context):
        return
    flag = "--update-weight-mode delta"
    for given, other, reason in (
        (args.colocate, "--colocate", "has engines that read the weights in the trainer's memory"),
        (args.update_weight_transport == "disk", "--update-weight-transport disk", "writes whole models"),
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
