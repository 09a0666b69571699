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
