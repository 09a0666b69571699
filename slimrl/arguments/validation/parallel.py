"""Rules about parallel layouts: how training divides over GPUs, pipeline stages, Megatron-FSDP and recomputation.

Every layer is on one stage and every stage has layers. Megatron-FSDP has a sharding strategy and only compatible flags.
Recomputation names modules that the model has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from slimrl.arguments.flag import Problem
from slimrl.arguments.layout import stage_layers
from slimrl.arguments.namespace import Arguments, Context
from slimrl.arguments.validation.cluster import ACTOR_FIELDS

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
                f"{shown} divides layers over pipeline stages and there is only one stage: leave it out, or raise"
                " --pipeline-model-parallel-size.",
            )


def layers_divide_over_stages(args: Arguments, context: Context) -> Iterator[Problem]:
    """The layers that are not on an explicit first or last stage divide evenly over the other stages."""
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
    """Every pipeline rank has the same number of virtual stages of the same size."""
    stages, layers = args.pipeline_model_parallel_size, args.num_layers
    size, number = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    if stages == 1 or layers is None:
        return
    if size is not None and number is not None:
        yield Problem(
            "--num-layers-per-virtual-pipeline-stage",
            f"--num-layers-per-virtual-pipeline-stage {size} and --num-virtual-stages-per-pipeline-rank {number}"
            f" exclude"
            " each other: give one.",
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


def virtual_stages_exchange_groups(args: Arguments, context: Context) -> Iterator[Problem]:
    """Virtual stages exchange activations correctly, in groups of micro-batches that fill the stages."""
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
            "--no-overlap-p2p-communication mixes up the messages between virtual stages with"
            " --pipeline-model-parallel-size 2: leave it out.",
        )
    if group is None or group < stages:
        yield Problem(
            "--microbatch-group-size-per-vp-stage",
            f"--microbatch-group-size-per-vp-stage {group} is less than --pipeline-model-parallel-size {stages}:"
            f" give at least {stages}.",
        )


_SWITCH = "--use-megatron-fsdp"
_SETTINGS = ("data_parallel_sharding_strategy", "suggested_communication_unit_size", "fsdp_double_buffer")


def sharding_has_its_switch(args: Arguments, context: Context) -> Iterator[Problem]:
    """Settings of Megatron-FSDP need it, and it needs a sharding strategy."""
    if not args.use_megatron_fsdp:
        for name in _SETTINGS:
            if name in context.given:
                flag = "--" + name.replace("_", "-")
                yield Problem(flag, f"{flag} belongs to {_SWITCH}: add it, or leave {flag} out.")
    elif args.data_parallel_sharding_strategy == "no_shard" and "data_parallel_sharding_strategy" not in context.broken:
        yield Problem(
            _SWITCH,
            f"{_SWITCH} with --data-parallel-sharding-strategy no_shard shards nothing: give optim, optim_grads or"
            f" optim_grads_params, or leave {_SWITCH} out.",
        )


def sharding_fits_the_run(args: Arguments, context: Context) -> Iterator[Problem]:
    """Flags that Megatron-FSDP of megatron-core 0.16.1 cannot combine with, or whose state it does not keep."""
    if not args.use_megatron_fsdp:
        return
    if not args.use_distributed_optimizer:
        yield Problem(
            _SWITCH,
            f"{_SWITCH} always shards the optimizer state: leave --no-use-distributed-optimizer out.",
        )
    for given, flag, reason in (
        (args.pipeline_model_parallel_size > 1, "--pipeline-model-parallel-size", "does not support pipeline stages"),
        (args.fp16, "--fp16", "keeps no loss scale in checkpoints"),
        (args.grad_reduce_in_bf16, "--grad-reduce-in-bf16", "accumulates shards of each micro-batch in fp32"),
        (args.use_precision_aware_optimizer, "--use-precision-aware-optimizer", "keeps its state in fp32"),
        (args.optimizer_cpu_offload, "--optimizer-cpu-offload", "keeps its state on the device"),
    ):
        if given:
            yield Problem(flag, f"{_SWITCH} {reason}: leave {flag} out, or {_SWITCH}.")
    if args.overlap_grad_reduce and args.data_parallel_sharding_strategy == "optim":
        yield Problem(
            "--overlap-grad-reduce",
            f"{_SWITCH} with --data-parallel-sharding-strategy optim adds each GPU's own gradient twice with"
            " --overlap-grad-reduce: leave it out, or also shard gradients (optim_grads).",
        )
    only = args.only_train_params_name_list is not None
    if (only or args.freeze_params_name_list is not None) and args.data_parallel_sharding_strategy == "optim":
        flag = "--only-train-params-name-list" if only else "--freeze-params-name-list"
        yield Problem(
            flag,
            f"{_SWITCH} with --data-parallel-sharding-strategy optim reduces the gradients of frozen weights, which"
            f" have none: leave {flag} out, or also shard gradients (optim_grads).",
        )
    if not context.broken & _OF_GRADIENTS:
        yield from gradients_can_be_sharded(args)


_SIZES = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
_OF_GRADIENTS = {*_SIZES, "data_parallel_sharding_strategy", *ACTOR_FIELDS}


def gradients_can_be_sharded(args: Arguments, of: str = "") -> Iterator[Problem]:
    """If a weight is on one GPU only, megatron-core 0.16.1 adds its gradients again at each micro-batch.

    `args` are the flags of the policy, or as they apply to a critic on GPUs of its own: `of` names it.
    """
    strategy = args.data_parallel_sharding_strategy
    if not args.use_megatron_fsdp or strategy not in ("optim_grads", "optim_grads_params"):
        return
    tp = args.tensor_model_parallel_size
    if args.actor_num_gpus <= tp:
        shared = f" and --tensor-model-parallel-size {tp}" if tp > 1 else ""
        yield Problem(
            _SWITCH,
            f"{_SWITCH} with --data-parallel-sharding-strategy {strategy}{shared} leaves each weight{of} on one GPU,"
            f" where it cannot shard its gradients: leave {_SWITCH} out, or use --data-parallel-sharding-strategy"
            " optim.",
        )
        return
    holders = args.actor_num_gpus // (args.expert_model_parallel_size * (args.expert_tensor_parallel_size or 1))
    if args.num_experts is not None and holders <= 1:
        yield Problem(
            "--expert-model-parallel-size",
            f"--expert-model-parallel-size {args.expert_model_parallel_size} leaves each expert{of} on one GPU, where"
            f" {_SWITCH} cannot shard its gradients: lower it, or use --data-parallel-sharding-strategy optim.",
        )


_STAGES = {"num_layers", "recompute_num_layers", "pipeline_model_parallel_size"}


def recomputation_is_complete(args: Arguments, context: Context) -> Iterator[Problem]:
    """Full recomputation has a method and a number of layers; selective recomputation has neither."""
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
    """Uniform units fill every stage; otherwise megatron-core would look for layers beyond the last one."""
    unit = args.recompute_num_layers
    if args.recompute_method != "uniform" or not unit or args.num_layers is None or _STAGES & context.broken:
        return
    if unit > args.num_layers:  # another rule reports it
        return
    for stage, layers in enumerate(stage_layers(args)):
        for count in _runs(layers):
            if count % unit:
                several = args.pipeline_model_parallel_size > 1
                where = f"the {count} consecutive layers of pipeline stage {stage}" if several else ""
                yield Problem(
                    "--recompute-num-layers",
                    f"--recompute-num-layers {unit} with --recompute-method uniform does not divide"
                    f" {where or f'--num-layers {count}'}: choose a divisor, such as 1.",
                )
                return


def _runs(layers: tuple[int, ...]) -> list[int]:
    """The number of consecutive layers of each (virtual) stage."""
    starts = [place for place, layer in enumerate(layers) if place == 0 or layers[place - 1] != layer - 1]
    return [end - start for start, end in zip(starts, [*starts[1:], len(layers)], strict=True)]


def recomputed_modules_are_there(args: Arguments, context: Context) -> Iterator[Problem]:
    """The model has every module of --recompute-modules, and selective recomputation is on."""
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


def saved_activations_have_gpus(args: Arguments, context: Context) -> Iterator[Problem]:
    """--distribute-saved-activations needs full recomputation and tensor parallelism without sequence parallelism."""
    if not args.distribute_saved_activations:
        return
    if args.recompute_granularity != "full" or args.tensor_model_parallel_size == 1:
        yield Problem(
            "--distribute-saved-activations",
            "--distribute-saved-activations needs --recompute-granularity full and --tensor-model-parallel-size above"
            " 1: add the missing one, or leave the flag out.",
        )
    elif args.sequence_parallel:
        yield Problem(
            "--distribute-saved-activations",
            "--distribute-saved-activations is redundant, --sequence-parallel already shards these activations: leave"
            " it out.",
        )


def _training_gpus(args: Arguments) -> str:
    return (
        f"--actor-num-nodes {args.actor_num_nodes} x --actor-num-gpus-per-node {args.actor_num_gpus_per_node}"
        f" = {args.actor_num_gpus}"
    )


_AXES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_EXPERT_AXES = ("expert_tensor_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size")


def sizes_that_do_not_divide(args: Arguments) -> Iterator[tuple[dict[str, int], str]]:
    """The sizes above 1 by attribute, of layers or of experts, whose product does not divide the GPUs; as text, too."""
    for names in (_AXES, _EXPERT_AXES) if args.num_experts is not None else (_AXES,):
        used = {name: size for name in names if (size := vars(args)[name] or 1) > 1}
        if args.actor_num_gpus % math.prod(used.values()):
            yield used, " x ".join(f"--{name.replace('_', '-')} {size}" for name, size in used.items())


def world_divides_by_model_gpus(args: Arguments, context: Context) -> Iterator[Problem]:
    """Training GPUs = data x tensor x pipeline x context parallel size, and the same for the experts' layout."""
    if args.debug_rollout_only or context.broken & {*ACTOR_FIELDS, *_AXES, *_EXPERT_AXES}:
        return
    for used, shown in sizes_that_do_not_divide(args):
        several = len(used) > 1
        total = f" = {math.prod(used.values())}" if several else ""
        fix = "choose sizes whose product divides them" if several else "choose a divisor"
        yield Problem(
            "--" + next(iter(used)).replace("_", "-"),
            f"{_training_gpus(args)} training GPUs do not divide by {shown}{total}: {fix}.",
        )


def model_divides_by_tensor_parallel(args: Arguments, context: Context) -> Iterator[Problem]:
    """Heads, key/value heads, both widths and the padded vocabulary divide by the tensor parallel size."""
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


def experts_divide_over_gpus(args: Arguments, context: Context) -> Iterator[Problem]:
    """Experts divide evenly over an expert parallel group; expert layouts need experts."""
    size, experts = args.expert_model_parallel_size, args.num_experts
    if {"expert_model_parallel_size", "num_experts"} & context.broken:
        return
    if size > 1 and experts is None:
        yield Problem(
            "--expert-model-parallel-size",
            f"--expert-model-parallel-size {size} needs experts and the model has none: leave it out.",
        )
    elif experts is not None and experts % size:
        yield Problem(
            "--expert-model-parallel-size",
            f"--num-experts {experts} does not divide by --expert-model-parallel-size {size}: choose a divisor.",
        )
    tp, etp = args.tensor_model_parallel_size, args.expert_tensor_parallel_size
    if experts is None and etp not in (1, tp) and "expert_tensor_parallel_size" not in context.broken:
        yield Problem(
            "--expert-tensor-parallel-size",
            f"--expert-tensor-parallel-size {etp} needs experts and the model has none: leave it out.",
        )
    if experts is not None and tp > 1 and not args.sequence_parallel and not args.debug_rollout_only:
        yield Problem(
            "--sequence-parallel",
            f"--num-experts with --tensor-model-parallel-size {tp} trains with --sequence-parallel only: add it.",
        )
