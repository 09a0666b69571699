"""Rules about pipeline stages: every layer stands on one stage, and every stage has layers."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context

_ONLY_WITH_STAGES = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "microbatch_group_size_per_vp_stage",
)


def stages_are_several(args: Arguments, context: Context) -> Iterator[Problem]:
    """Flags that divide layers over stages need stages."""
    if args.pipeline_model_parallel_size > 1 or "pipeline_model_parallel_size" in context.broken:
        return
    values = vars(args)
    for name in _ONLY_WITH_STAGES:
        if values[name]:
            flag = "--" + name.replace("_", "-")
            shown = flag if values[name] is True else f"{flag} {values[name]}"
            yield Problem(
                flag,
                f"{shown} divides layers over pipeline stages and there is one: leave it out, or raise"
                " --pipeline-model-parallel-size.",
            )


def layers_divide_over_stages(args: Arguments, context: Context) -> Iterator[Problem]:
    """The layers that the first and last stage leave are shared out evenly."""
    stages, layers = args.pipeline_model_parallel_size, args.num_layers
    if stages == 1 or layers is None or {"num_layers", "pipeline_model_parallel_size"} & context.broken:
        return
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    extra = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    rest = layers + extra - (first or 0) - (last or 0)
    others = stages - (first is not None) - (last is not None)
    what = f"--num-layers {layers}"
    if extra:
        what += f" + {extra} for --account-for-..."
    if first is not None:
        what += f" - {first} on the first stage"
    if last is not None:
        what += f" - {last} on the last"
    if rest < 0 or (others == 0 and rest) or (others and (rest == 0 or rest % others)):
        yield Problem(
            "--pipeline-model-parallel-size",
            f"{what} = {rest} layers do not divide over the {'other ' if others < stages else ''}{others} of"
            f" --pipeline-model-parallel-size {stages} stages: choose a divisor, or set"
            " --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers.",
        )


def virtual_stages_divide(args: Arguments, context: Context) -> Iterator[Problem]:
    """Every slot holds the same number of virtual stages of the same size."""
    stages, layers = args.pipeline_model_parallel_size, args.num_layers
    size, number = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    if stages == 1 or layers is None:
        return
    if size is not None and number is not None:
        yield Problem(
            "--num-layers-per-virtual-pipeline-stage",
            f"--num-layers-per-virtual-pipeline-stage {size} and --num-virtual-stages-per-pipeline-rank {number} say"
            " the same in two ways: give one.",
        )
        return
    extra = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    uneven = args.decoder_first_pipeline_num_layers is not None or args.decoder_last_pipeline_num_layers is not None
    unit = stages * (size or number or 1)
    if (size or number) and not uneven and (layers + extra) % unit:
        flag = "num_layers_per_virtual_pipeline_stage" if size else "num_virtual_stages_per_pipeline_rank"
        flag = "--" + flag.replace("_", "-")
        yield Problem(
            flag,
            f"--num-layers {layers}{f' + {extra}' if extra else ''} does not divide by --pipeline-model-parallel-size"
            f" {stages} x {flag} {size or number} = {unit}: choose sizes whose product divides it.",
        )


def virtual_stages_are_fed(args: Arguments, context: Context) -> Iterator[Problem]:
    """Virtual stages exchange what they compute without mixing it up, and take micro-batches in whole groups."""
    stages, group = args.pipeline_model_parallel_size, args.microbatch_group_size_per_vp_stage
    if stages == 1:
        return
    if args.virtual_pipeline_model_parallel_size is None:
        if group is not None:
            yield Problem(
                "--microbatch-group-size-per-vp-stage",
                f"--microbatch-group-size-per-vp-stage {group} is for virtual stages and there are none: give"
                " --num-layers-per-virtual-pipeline-stage, or leave it out.",
            )
        return
    if stages == 2 and not args.overlap_p2p_comm:
        yield Problem(
            "--no-overlap-p2p-communication",
            "--no-overlap-p2p-communication mixes up what the virtual stages of --pipeline-model-parallel-size 2 send"
            " each other: leave it out.",
        )
    if group < stages:
        yield Problem(
            "--microbatch-group-size-per-vp-stage",
            f"--microbatch-group-size-per-vp-stage {group} is less than --pipeline-model-parallel-size {stages}:"
            f" give at least {stages}.",
        )
        return
    samples = 1 if args.use_dynamic_batch_size else args.micro_batch_size
    unit = args.data_parallel_size * group * samples
    batch = args.global_batch_size
    if batch and (batch < unit if args.use_dynamic_batch_size else batch % unit):
        parts = f"data parallel size {args.data_parallel_size} x {group} micro-batches of a virtual stage"
        parts += "" if args.use_dynamic_batch_size else f" x --micro-batch-size {samples}"
        yield Problem(
            "--global-batch-size",
            f"--global-batch-size {batch} does not fill {parts} = {unit}: choose"
            f" {'at least' if args.use_dynamic_batch_size else 'a multiple of'} {unit}.",
        )
