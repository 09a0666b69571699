"""Rules about the optimizer, its learning-rate schedule, its state and skipped steps."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.derive import transformer_engine_installed
from slimrl.arguments.flag import Problem, flag_specs
from slimrl.arguments.flags.optimizer import OffloadArguments, OptimizerArguments
from slimrl.arguments.namespace import Arguments, Context


def schedule_is_complete(args: Arguments, context: Context) -> Iterator[Problem]:
    """The flags of the learning rate schedule are consistent."""
    if args.min_lr > args.lr:
        yield Problem("--min-lr", f"--min-lr {args.min_lr:g} is above --lr {args.lr:g}: lower it.")
    if args.lr_warmup_init > args.lr:
        yield Problem(
            "--lr-warmup-init", f"--lr-warmup-init {args.lr_warmup_init:g} is above --lr {args.lr:g}: lower it."
        )
    if args.lr_warmup_fraction is not None and args.lr_warmup_iters:
        yield Problem(
            "--lr-warmup-fraction",
            f"--lr-warmup-fraction {args.lr_warmup_fraction:g} and --lr-warmup-iters {args.lr_warmup_iters} both set"
            " the warm-up: give one.",
        )
    if args.lr_decay_iters is not None and args.lr_warmup_iters >= args.lr_decay_iters:
        yield Problem(
            "--lr-warmup-iters",
            f"--lr-warmup-iters {args.lr_warmup_iters} is not below --lr-decay-iters {args.lr_decay_iters}: the decay"
            " begins after the warm-up.",
        )
    wsd = args.lr_decay_style == "WSD"
    if wsd and args.lr_wsd_decay_iters is None and "lr_wsd_decay_iters" not in context.broken:
        yield Problem(
            "--lr-wsd-decay-iters",
            "--lr-decay-style WSD needs --lr-wsd-decay-iters: give the optimizer steps of the decay at the end.",
        )
    for name, needed, given in (
        ("lr_wsd_decay_iters", "--lr-decay-style WSD", wsd),
        ("lr_wsd_decay_style", "--lr-decay-style WSD", wsd),
        ("decoupled_min_lr", "--decoupled-lr", args.decoupled_lr is not None),
    ):
        if name in context.given and not given:
            flag = "--" + name.replace("_", "-")
            yield Problem(flag, f"{flag} {vars(args)[name]} belongs to {needed}: add it, or leave {flag} out.")


_SETTINGS = {  # of optimizers
    "adam": ("adam_beta1", "adam_beta2", "adam_eps"),
    "sgd": ("sgd_momentum",),
    "muon": tuple(spec.dest for spec in flag_specs(OptimizerArguments) if spec.dest.startswith("muon_")),
}


def other_owner(name: str, optimizer: str) -> str | None:
    """The optimizer that a setting belongs to, if it is another; Muon leaves some weights to Adam."""
    used = {"muon": ("muon", "adam")}.get(optimizer, (optimizer,))
    owners = [owner for owner, names in _SETTINGS.items() if name in names and owner not in used]
    return owners[0] if owners else None


def optimizer_settings_belong_to_the_optimizer(args: Arguments, context: Context) -> Iterator[Problem]:
    """A setting of another optimizer would have no effect."""
    for owner, names in _SETTINGS.items():
        for spec in flag_specs(OptimizerArguments):
            if spec.dest in names and spec.dest in context.given and other_owner(spec.dest, args.optimizer):
                flag = (spec.off if spec.is_switch and not vars(args)[spec.dest] else spec.on)[0]
                yield Problem(flag, f"{flag} belongs to --optimizer {owner}: add it, or leave {flag} out.")
    if args.muon_num_ns_steps % 5 and "muon_num_ns_steps" not in context.broken:
        yield Problem(
            "--muon-num-ns-steps",
            f"--muon-num-ns-steps {args.muon_num_ns_steps} ends within a round of the five steps whose coefficients"
            " belong together: give a multiple of 5.",
        )


def other_optimizers_fit_the_run(args: Arguments, context: Context) -> Iterator[Problem]:
    """Flags that SGD and Muon of megatron-core 0.16.1 cannot combine with."""
    if args.optimizer == "adam":
        return
    muon, name = args.optimizer == "muon", f"--optimizer {args.optimizer}"
    whole = "keeps its whole state on each data parallel GPU"
    for given, flag, reason in (
        (args.use_megatron_fsdp, "--use-megatron-fsdp", whole),
        (args.use_distributed_optimizer, "--use-distributed-optimizer", whole),
        (args.overlap_param_gather, "--overlap-param-gather", whole),
        (muon and args.fp16, "--fp16", "has no loss scale"),
        (args.use_precision_aware_optimizer, "--use-precision-aware-optimizer", "keeps its state in fp32"),
        (args.optimizer_cpu_offload, "--optimizer-cpu-offload", "keeps its state on the device"),
    ):
        if given:
            yield Problem(flag, f"{name} {reason}: leave {flag} out, or use --optimizer adam.")


_OF_OFFLOAD = (
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "pin_cpu_grads",
    "pin_cpu_params",
)


_FEWER_BITS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def optimizer_state_types_fit_the_optimizer(args: Arguments, context: Context) -> Iterator[Problem]:
    """State in fewer bits needs the precision-aware optimizer; parts of it need the distributed optimizer."""
    values = vars(args)
    for name in _FEWER_BITS:
        if values[name] != "fp32" and not args.use_precision_aware_optimizer:
            flag = "--" + name.replace("_", "-")
            yield Problem(
                flag,
                f"{flag} {values[name]} needs --use-precision-aware-optimizer: add it, or leave {flag} out.",
            )
        elif values[name] != "fp32" and args.optimizer_cpu_offload:
            flag = "--" + name.replace("_", "-")
            yield Problem(
                flag,
                f"{flag} {values[name]} conflicts with --optimizer-cpu-offload, which keeps fp32 state: leave one of"
                " them out.",
            )
        elif values[name] == "fp8" and args.offload_train:
            flag = "--" + name.replace("_", "-")
            yield Problem(
                flag,
                f"{flag} fp8 keeps tensors that --offload-train cannot copy: give {flag} bf16, or --no-offload-train.",
            )
        elif values[name] != "fp32" and not transformer_engine_installed():
            flag = "--" + name.replace("_", "-")
            yield Problem(
                flag,
                f"{flag} {values[name]} needs a package that is not installed: install transformer_engine, or leave"
                f" {flag} out.",
            )
    for flag, given in (
        ("--use-precision-aware-optimizer", args.use_precision_aware_optimizer),
        ("--optimizer-cpu-offload", args.optimizer_cpu_offload),
        ("--overlap-param-gather", args.overlap_param_gather),
    ):
        if given and not args.use_distributed_optimizer and args.optimizer == "adam":
            yield Problem(
                flag,
                f"{flag} needs the distributed optimizer: leave --no-use-distributed-optimizer out, or {flag}.",
            )
    if args.grad_reduce_in_bf16 and not (args.bf16 or "bf16" in context.broken):
        yield Problem(
            "--grad-reduce-in-bf16", "--grad-reduce-in-bf16 needs bf16 weights: add --bf16, or leave the flag out."
        )
    if args.grad_reduce_in_bf16 and args.accumulate_allreduce_grads_in_fp32:
        yield Problem(
            "--grad-reduce-in-bf16",
            "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other: give one.",
        )
    if args.overlap_param_gather and not args.overlap_grad_reduce:
        yield Problem("--overlap-param-gather", "--overlap-param-gather needs --overlap-grad-reduce: add it.")


def skipped_step_limit_belongs_to_nan_check(args: Arguments, context: Context) -> Iterator[Problem]:
    """--max-skipped-steps needs --no-check-for-nan-in-loss-and-grad."""
    default = next(spec.default for spec in flag_specs(OptimizerArguments) if spec.dest == "max_skipped_steps")
    if args.check_for_nan_in_loss_and_grad and args.max_skipped_steps != default:
        yield Problem(
            "--max-skipped-steps",
            f"--max-skipped-steps {args.max_skipped_steps} belongs to --no-check-for-nan-in-loss-and-grad: add it, or"
            " leave --max-skipped-steps out.",
        )


def optimizer_in_host_memory_is_complete(args: Arguments, context: Context) -> Iterator[Problem]:
    """Flags that --optimizer-cpu-offload of megatron-core 0.16.1 needs are given; flags that need it have it."""
    if not args.optimizer_cpu_offload:
        for spec in flag_specs(OffloadArguments):
            if spec.dest in _OF_OFFLOAD and vars(args)[spec.dest] != spec.default:
                name = (spec.off if spec.is_switch and not vars(args)[spec.dest] else spec.on)[0]
                yield Problem(name, f"{name} belongs to --optimizer-cpu-offload: add it, or leave {name} out.")
        return
    for kept, sentence in (
        (
            args.use_precision_aware_optimizer,
            "--optimizer-cpu-offload takes its gradients from --use-precision-aware-optimizer: add it.",
        ),
        (
            args.bf16 or args.fp16 or {"bf16", "fp16"} & context.broken,
            "--optimizer-cpu-offload keeps fp32 copies of 16-bit weights and cannot load others: add --bf16, or leave"
            " --optimizer-cpu-offload out.",
        ),
        (
            args.decoupled_weight_decay,
            "--optimizer-cpu-offload decouples the weight decay: leave --no-weight-decay-decoupling out, or"
            " --optimizer-cpu-offload.",
        ),
    ):
        if not kept:
            yield Problem("--optimizer-cpu-offload", sentence)
    if args.optimizer_offload_fraction < 1 and args.overlap_cpu_optimizer_d2h_h2d and args.grad_reduce_in_bf16:
        yield Problem(
            "--overlap-cpu-optimizer-d2h-h2d",
            f"--overlap-cpu-optimizer-d2h-h2d with --optimizer-offload-fraction {args.optimizer_offload_fraction:g} and"
            " --grad-reduce-in-bf16 steps on gradients that megatron-core 0.16.1 may still be converting: leave one of"
            " them out.",
        )
