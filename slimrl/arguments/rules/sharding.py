"""Rules about Megatron-FSDP: what is shared out, and what it can be used together with."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context

_SWITCH = "--use-megatron-fsdp"
_SETTINGS = ("data_parallel_sharding_strategy", "suggested_communication_unit_size", "fsdp_double_buffer")


def sharding_has_its_switch(args: Arguments, context: Context) -> Iterator[Problem]:
    """Settings of Megatron-FSDP belong to it, and it must be told what to share out."""
    if not args.use_megatron_fsdp:
        for name in _SETTINGS:
            if name in context.given:
                flag = "--" + name.replace("_", "-")
                yield Problem(flag, f"{flag} belongs to {_SWITCH}: add it, or leave {flag} out.")
    elif args.data_parallel_sharding_strategy == "no_shard" and "data_parallel_sharding_strategy" not in context.broken:
        yield Problem(
            _SWITCH,
            f"{_SWITCH} with --data-parallel-sharding-strategy no_shard shares nothing out: give optim, optim_grads or"
            f" optim_grads_params, or leave {_SWITCH} out.",
        )


def sharding_fits_the_run(args: Arguments, context: Context) -> Iterator[Problem]:
    """What Megatron-FSDP of megatron-core 0.16.1 cannot do, or does wrongly, or what its state is not kept for."""
    if not args.use_megatron_fsdp:
        return
    if not args.use_distributed_optimizer:
        yield Problem(
            _SWITCH,
            f"{_SWITCH} shares out the optimizer's state in any case: leave --no-use-distributed-optimizer out.",
        )
    frozen = args.only_train_params_name_list is not None or args.freeze_params_name_list is not None
    for given, flag, reason in (
        (args.pipeline_model_parallel_size > 1, "--pipeline-model-parallel-size", "knows no pipeline stages"),
        (frozen, _list_of(args), "hooks into the gradient of every weight"),
        (args.fp16, "--fp16", "keeps no loss scale in checkpoints"),
        (args.grad_reduce_in_bf16, "--grad-reduce-in-bf16", "adds up shards of each micro-batch, in fp32"),
        (args.fp8_param_gather, "--fp8-param-gather", "gathers weights in the type that they are pushed in"),
        (args.use_precision_aware_optimizer, "--use-precision-aware-optimizer", "keeps its state in fp32"),
        (args.optimizer_cpu_offload, "--optimizer-cpu-offload", "keeps its state on the device"),
        (bool(args.offload_train), "--offload-train", "has buffers that are not parked"),
    ):
        if given:
            yield Problem(flag, f"{_SWITCH} {reason}: leave {flag} out, or {_SWITCH}.")
    if args.overlap_grad_reduce and args.data_parallel_sharding_strategy == "optim":
        yield Problem(
            "--overlap-grad-reduce",
            f"{_SWITCH} with --data-parallel-sharding-strategy optim adds each slot's own gradient a second time under"
            " --overlap-grad-reduce: leave it out, or share gradients out too (optim_grads).",
        )
    yield from _experts_are_shared_out(args, context)


def _list_of(args: Arguments) -> str:
    only = args.only_train_params_name_list is not None
    return "--only-train-params-name-list" if only else "--freeze-params-name-list"


def _experts_are_shared_out(args: Arguments, context: Context) -> Iterator[Problem]:
    """Where each expert is on one slot only, megatron-core 0.16.1 adds up its gradients anew at each micro-batch."""
    sizes = {"expert_model_parallel_size", "expert_tensor_parallel_size", "actor_num_nodes", "actor_num_gpus_per_node"}
    if args.num_experts is None or context.broken & sizes:
        return
    holders = args.actor_num_gpus // (args.expert_model_parallel_size * (args.expert_tensor_parallel_size or 1))
    if holders <= 1 and args.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params"):
        yield Problem(
            "--expert-model-parallel-size",
            f"--expert-model-parallel-size {args.expert_model_parallel_size} leaves each expert on one slot, where"
            f" {_SWITCH} cannot share its gradients out: lower it, or use --data-parallel-sharding-strategy optim.",
        )
