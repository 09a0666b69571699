"""Rules about number formats, the optimizer's precision and overlapped communication."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.derive import transformer_engine_installed
from slimrl.arguments.flag import Problem, flag_specs
from slimrl.arguments.flags.model import ModelArguments
from slimrl.arguments.flags.optimizer import OffloadArguments, OptimizerArguments
from slimrl.arguments.flags.precision import PrecisionArguments
from slimrl.arguments.namespace import Arguments
from slimrl.arguments.validation.rule import Context

_OF_FP16 = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_OF_FP8 = (
    "fp8_param_gather",
    "fp8_recipe",
    "fp8_margin",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_wgrad",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
    "tp_only_amax_red",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "activation_func_fp8_input_store",
)
_OF_FP4 = ("fp4_param_gather", "fp4_recipe")
_OF_OFFLOAD = (
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "pin_cpu_grads",
    "pin_cpu_params",
)
_FEWER_BITS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def few_bits_have_their_kernels(args: Arguments, context: Context) -> Iterator[Problem]:
    """fp8 and fp4 are computed by Transformer Engine alone, from bf16 weights."""
    for flag, value in (("--fp8-format", args.fp8_format), ("--fp4-format", args.fp4_format)):
        if value is None:
            continue
        if not transformer_engine_installed():
            yield Problem(
                flag,
                f"{flag} {value} needs a package that is not installed: install transformer_engine, or leave it out.",
            )
        if not args.bf16:
            yield Problem(flag, f"{flag} {value} computes from bf16 weights: add --bf16.")
    if args.fp8_format is not None and args.fp4_format is not None:
        yield Problem(
            "--fp4-format",
            f"--fp8-format {args.fp8_format} and --fp4-format {args.fp4_format} exclude each other: give one.",
        )


def formats_have_their_settings(args: Arguments, context: Context) -> Iterator[Problem]:
    """A setting of a number format that is not chosen is a slip; its default changes nothing and passes."""
    for spec in flag_specs(PrecisionArguments) + flag_specs(ModelArguments):
        for names, needed, given in (
            (_OF_FP16, "--fp16", args.fp16),
            (_OF_FP8, "--fp8-format", args.fp8_format is not None),
            (_OF_FP4, "--fp4-format", args.fp4_format is not None),
        ):
            if spec.dest in names and vars(args)[spec.dest] != spec.default and not given:
                name = (spec.off if spec.is_switch and not vars(args)[spec.dest] else spec.on)[0]
                yield Problem(name, f"{name} belongs to {needed}: add it, or leave {name} out.")


def optimizer_state_has_a_holder(args: Arguments, context: Context) -> Iterator[Problem]:
    """State in fewer bits is the precision aware optimizer's; parts of it need the distributed optimizer."""
    values = vars(args)
    for name in _FEWER_BITS:
        if values[name] != "fp32" and not args.use_precision_aware_optimizer:
            flag = "--" + name.replace("_", "-")
            yield Problem(
                flag,
                f"{flag} {values[name]} is kept by --use-precision-aware-optimizer only: add it, or leave {flag} out.",
            )
        elif values[name] != "fp32" and args.optimizer_cpu_offload:
            flag = "--" + name.replace("_", "-")
            yield Problem(
                flag,
                f"{flag} {values[name]} is not what --optimizer-cpu-offload keeps, which is fp32: leave one of them"
                " out.",
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
        if given and not args.use_distributed_optimizer:
            yield Problem(
                flag,
                f"{flag} needs the distributed optimizer: leave --no-use-distributed-optimizer out, or {flag}.",
            )
    if args.grad_reduce_in_bf16 and not (args.bf16 or "bf16" in context.broken):
        yield Problem(
            "--grad-reduce-in-bf16", "--grad-reduce-in-bf16 is for bf16 weights: add --bf16, or leave the flag out."
        )
    if args.grad_reduce_in_bf16 and args.accumulate_allreduce_grads_in_fp32:
        yield Problem(
            "--grad-reduce-in-bf16",
            "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other: give one.",
        )
    if args.overlap_param_gather and not args.overlap_grad_reduce:
        yield Problem("--overlap-param-gather", "--overlap-param-gather needs --overlap-grad-reduce: add it.")


def skipped_steps_are_bounded_where_they_are_skipped(args: Arguments, context: Context) -> Iterator[Problem]:
    """A run that ends at the first step that is not finite skips none."""
    default = next(spec.default for spec in flag_specs(OptimizerArguments) if spec.dest == "max_skipped_steps")
    if args.check_for_nan_in_loss_and_grad and args.max_skipped_steps != default:
        yield Problem(
            "--max-skipped-steps",
            f"--max-skipped-steps {args.max_skipped_steps} belongs to --no-check-for-nan-in-loss-and-grad: add it, or"
            " leave --max-skipped-steps out.",
        )


def optimizer_in_host_memory_is_complete(args: Arguments, context: Context) -> Iterator[Problem]:
    """What --optimizer-cpu-offload needs of megatron-core 0.16.1, and what belongs to it."""
    if not args.optimizer_cpu_offload:
        for spec in flag_specs(OffloadArguments):
            if spec.dest in _OF_OFFLOAD and vars(args)[spec.dest] != spec.default:
                name = (spec.off if spec.is_switch and not vars(args)[spec.dest] else spec.on)[0]
                yield Problem(name, f"{name} belongs to --optimizer-cpu-offload: add it, or leave {name} out.")
        return
    for kept, sentence in (
        (
            args.use_precision_aware_optimizer,
            "--optimizer-cpu-offload gets gradients in the way of --use-precision-aware-optimizer: add it.",
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
