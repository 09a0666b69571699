"""Rules about recomputation: it says what it recomputes, and the model has that."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.plan.layout import stage_layers
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context

_STAGES = {"num_layers", "recompute_num_layers", "pipeline_model_parallel_size"}


def recomputation_is_complete(args: Arguments, context: Context) -> Iterator[Problem]:
    """Full recomputation says which layers; selective recomputation does not."""
    method, layers = args.recompute_method, args.recompute_num_layers
    if args.recompute_granularity == "full" and (method is None or layers is None):
        yield Problem(
            "--recompute-granularity",
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers, for example uniform"
            " and 1.",
        )
    if args.recompute_granularity != "full" and (method is not None or layers is not None):
        yield Problem(
            "--recompute-method",
            "--recompute-method and --recompute-num-layers belong to --recompute-granularity full: add it, or leave"
            " them out.",
        )
    if layers is not None and args.num_layers is not None and layers > args.num_layers:
        yield Problem(
            "--recompute-num-layers",
            f"--recompute-num-layers {layers} is more than --num-layers {args.num_layers}: lower it.",
        )


def recomputed_units_fill_the_stages(args: Arguments, context: Context) -> Iterator[Problem]:
    """Uniform units must fill every stage: megatron-core would look for layers behind the last one."""
    unit = args.recompute_num_layers
    if args.recompute_method != "uniform" or not unit or args.num_layers is None or _STAGES & context.broken:
        return
    if unit > args.num_layers:  # said by another rule
        return
    for stage, layers in enumerate(stage_layers(args)):
        for count in _runs(layers):
            if count % unit:
                several = args.pipeline_model_parallel_size > 1
                where = f"the {count} layers that pipeline stage {stage} computes in a row" if several else ""
                yield Problem(
                    "--recompute-num-layers",
                    f"--recompute-num-layers {unit} with --recompute-method uniform does not divide"
                    f" {where or f'--num-layers {count}'}: choose a divisor, such as 1.",
                )
                return


def _runs(layers: tuple[int, ...]) -> list[int]:
    """How many layers follow each other without a gap: one number for each (virtual) stage."""
    starts = [place for place, layer in enumerate(layers) if place == 0 or layers[place - 1] != layer - 1]
    return [end - start for start, end in zip(starts, [*starts[1:], len(layers)], strict=True)]


def recomputed_modules_are_there(args: Arguments, context: Context) -> Iterator[Problem]:
    """No module is named that the model does not have, and none in vain."""
    modules = args.recompute_modules or []
    if modules and args.recompute_granularity != "selective":
        yield Problem(
            "--recompute-modules",
            f"--recompute-modules {' '.join(modules)} belongs to --recompute-granularity selective: add it, or leave"
            " the modules out.",
        )
        return
    experts, pattern = args.num_experts is not None, args.moe_layer_freq
    dense = not experts or (0 in pattern if isinstance(pattern, list) else pattern > 1)
    shared = args.moe_shared_expert_intermediate_size is not None
    needs = {
        "mla_up_proj": (args.multi_latent_attention, "latent attention (--multi-latent-attention)"),
        "moe": (experts, "layers with experts (--num-experts)"),
        "moe_act": (args.moe_grouped_gemm, "experts in one grouped product (--moe-grouped-gemm)"),
        "shared_experts": (shared, "a shared expert (--moe-shared-expert-intermediate-size)"),
        "mlp": (dense, "a layer without experts (--moe-layer-freq)"),
    }
    for module in modules:
        there, what = needs.get(module, (True, ""))
        if not there:
            yield Problem(
                "--recompute-modules",
                f"--recompute-modules {module} recomputes {what} and there is none: leave it out.",
            )
    if "shared_experts" in modules and args.moe_shared_expert_overlap:
        yield Problem(
            "--recompute-modules",
            "--recompute-modules shared_experts and --moe-shared-expert-overlap exclude each other: leave one out.",
        )


def saved_activations_have_slots(args: Arguments, context: Context) -> Iterator[Problem]:
    """What is spread over tensor parallel slots is not spread there already, and there are such slots."""
    if not args.distribute_saved_activations:
        return
    if args.recompute_granularity != "full" or args.tensor_model_parallel_size == 1:
        yield Problem(
            "--distribute-saved-activations",
            "--distribute-saved-activations spreads what --recompute-granularity full saves over"
            " --tensor-model-parallel-size slots, and one of the two is missing: add it, or leave the first out.",
        )
    elif args.sequence_parallel:
        yield Problem(
            "--distribute-saved-activations",
            "--distribute-saved-activations is what --sequence-parallel does already: leave it out.",
        )
