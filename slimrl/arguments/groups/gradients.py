"""Flags of gradient buffers, their reduction over data parallel slots and sharding, in Megatron-LM's spelling."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag

_NCCL = "it hands Megatron-FSDP's buffers to NCCL, which is not checked in this version; leave it out"


@dataclasses.dataclass
class GradientArguments:
    """Data parallel gradients."""

    accumulate_allreduce_grads_in_fp32: bool = flag(
        False,
        "add and reduce gradients in fp32 (so with --bf16 unless --grad-reduce-in-bf16)",
        spellings=("--grad-reduce-in-fp32",),
    )
    grad_reduce_in_bf16: bool = flag(
        False, "add and reduce gradients in bf16 instead of fp32, with --bf16: half their memory, fewer digits"
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
        not_served="losses are divided by the number of tokens or samples of the step; leave it out",
    )
    check_for_large_grads: bool = flag(
        False,
        "stop where a gradient is much larger than before",
        not_served=("the gradient norm is in the log of each step; leave it out"),
    )
    use_nccl_ub: bool = flag(False, "registered NCCL buffers", spellings=("--nccl-ub",), not_served=_NCCL)
    disable_symmetric_registration: bool = flag(False, "plain registration of NCCL buffers", not_served=_NCCL)
    use_megatron_fsdp: bool = flag(
        False,
        "share out what --data-parallel-sharding-strategy names over the data parallel slots (Megatron-FSDP)",
        spellings=("--use-custom-fsdp",),
    )
    data_parallel_sharding_strategy: str = flag(
        "no_shard",
        "what Megatron-FSDP shards: optimizer state, gradients too, weights too (ZeRO-1, 2, 3)",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    outer_dp_sharding_strategy: str = flag(
        "no_shard",
        "what its outer level shards",
        choices=("no_shard", "optim"),
        not_served="there is one level of data parallel slots; leave it out",
    )
    suggested_communication_unit_size: int | None = flag(
        None, "Megatron-FSDP: weights in one collective (count; two layers' or 1e9)", at_least=1
    )
    preserve_fp32_weights: bool = flag(
        True,
        "Megatron-FSDP: no fp32 copies of bf16 weights",
        only_off=True,
        off=("--no-preserve-fp32-weights",),
        not_served="steps of reinforcement learning are smaller than bf16 can hold; leave it out",
    )
    fsdp_double_buffer: bool = flag(False, "Megatron-FSDP: gather weights into two buffers that stay")
    fsdp_manual_registration: bool = flag(False, "FSDP: register its buffers by hand", not_served=_NCCL)
