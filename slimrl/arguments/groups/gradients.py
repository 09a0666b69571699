"""Flags of gradient buffers, their reduction over data parallel slots and sharding, in Megatron-LM's spelling."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag

_FSDP = "Megatron-FSDP is not served in this version; use --use-distributed-optimizer"


@dataclasses.dataclass
class GradientArguments:
    """Data parallel gradients."""

    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "add and reduce gradients in fp32 (always so with --bf16)", spellings=("--grad-reduce-in-fp32",)
    )
    use_distributed_optimizer: bool = flag(
        True,
        "spread the optimizer state over the data parallel slots (on, as slime has it; Megatron-LM's default is off)",
        off=("--no-use-distributed-optimizer",),
    )
    num_distributed_optimizer_instances: int = flag(
        1,
        "copies of the spread optimizer state (count)",
        at_least=1,
        not_served="one copy is served; leave it out",
    )
    overlap_grad_reduce: bool = flag(False, "reduce gradients while the backward pass goes on")
    overlap_param_gather: bool = flag(
        False,
        "gather weights while the next forward pass goes on; needs --use-distributed-optimizer and"
        " --overlap-grad-reduce",
    )
    overlap_param_gather_with_optimizer_step: bool = flag(
        False,
        "gather weights while the optimizer steps",
        not_served="it holds for virtual pipeline stages without log-probability passes; leave it out",
    )
    align_param_gather: bool = flag(
        True,
        "pipeline stages gather weights on their own",
        only_off=True,
        off=("--no-align-param-gather",),
    )
    ddp_bucket_size: int | None = flag(
        None, "weights in one bucket of gradients (count; by data parallel size)", at_least=1
    )
    ddp_num_buckets: int | None = flag(
        None, "buckets of gradients (count)", at_least=1, not_served="use --ddp-bucket-size"
    )
    ddp_pad_buckets_for_high_nccl_busbw: bool = flag(False, "pad buckets to sizes that NCCL moves fast")
    ddp_reduce_scatter_with_fp32_accumulation: bool = flag(False, "add in fp32 what is sent in fewer bits")
    ddp_average_in_collective: bool = flag(
        False,
        "average within the collective",
        not_served="losses are divided by the number of tokens or samples of the step; leave it out",
    )
    gradient_reduce_div_fusion: bool = flag(
        True,
        "divide gradients apart from the reduction",
        only_off=True,
        off=("--no-gradient-reduce-div-fusion",),
        not_served=_FSDP,
    )
    check_for_large_grads: bool = flag(
        False,
        "stop where a gradient is much larger than before",
        not_served=("the gradient norm is in the log of each step; leave it out"),
    )
    use_nccl_ub: bool = flag(False, "registered NCCL buffers", spellings=("--nccl-ub",), not_served=_FSDP)
    disable_symmetric_registration: bool = flag(False, "plain registration of NCCL buffers", not_served=_FSDP)
    use_megatron_fsdp: bool = flag(
        False, "shard weights, gradients and state (ZeRO-3)", spellings=("--use-custom-fsdp",), not_served=_FSDP
    )
    data_parallel_sharding_strategy: str = flag(
        "no_shard",
        "what Megatron-FSDP shards",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
        not_served=_FSDP,
    )
    outer_dp_sharding_strategy: str = flag(
        "no_shard", "what its outer level shards", choices=("no_shard", "optim"), not_served=_FSDP
    )
    suggested_communication_unit_size: int | None = flag(
        None, "weights in one of its collectives (count)", not_served=_FSDP
    )
    preserve_fp32_weights: bool = flag(
        True, "FSDP keeps no fp32 weights", only_off=True, off=("--no-preserve-fp32-weights",), not_served=_FSDP
    )
    fsdp_double_buffer: bool = flag(False, "FSDP: fixed double buffers", not_served=_FSDP)
    fsdp_manual_registration: bool = flag(False, "FSDP: register its buffers by hand", not_served=_FSDP)
