"""Flags of model parallelism, recomputation, gradient reduction and sharding, in Megatron-LM's spelling."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class ParallelArguments:
    """Parallel layout and memory saving by recomputation."""

    tensor_model_parallel_size: int = flag(1, "GPUs that share each layer's matrices (count)", at_least=1)
    sequence_parallel: bool = flag(False, "share norm activations over the tensor parallel GPUs (off when that is 1)")
    pipeline_model_parallel_size: int = flag(1, "pipeline stages (count)", at_least=1)
    decoder_first_pipeline_num_layers: int | None = flag(
        None,
        "layers of the first pipeline stage (count; an even share)",
        at_least=1,
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None,
        "layers of the last pipeline stage (count; an even share)",
        at_least=1,
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        "layers of one virtual stage: each GPU holds several of them (count; one stage per GPU)",
        at_least=1,
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None,
        "virtual stages of each pipeline GPU (count); instead of --num-layers-per-virtual-pipeline-stage",
        at_least=1,
    )
    microbatch_group_size_per_vp_stage: int | None = flag(
        None, "micro-batches that a virtual stage takes in a row (count; pipeline stages)", at_least=1
    )
    pipeline_model_parallel_layout: str | None = flag(
        None,
        "layers of every stage as a drawing, such as Et*3|(tt|)*2L",
        not_served="give --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers instead",
    )
    account_for_embedding_in_pipeline_split: bool = flag(False, "count the embedding as one layer of the first stage")
    account_for_loss_in_pipeline_split: bool = flag(False, "count the output layer as one layer of the last stage")
    context_parallel_size: int = flag(
        1,
        "GPUs that share each sample's tokens (count)",
        at_least=1,
    )
    cp_comm_type: list[str] | None = flag(
        None,
        "how context parallel GPUs exchange keys and values with Transformer Engine (p2p)",
        choices=("p2p", "all_gather", "a2a", "a2a+p2p"),
        nargs="+",
    )
    hierarchical_context_parallel_sizes: list[int] | None = flag(
        None,
        "GPUs of each level of --cp-comm-type a2a+p2p",
        nargs="+",
        not_served="one level of context parallelism is served; use --context-parallel-size alone",
    )
    hybrid_context_parallel: bool = flag(
        False,
        "choose the context parallel size sample by sample",
        not_served="samples are packed instead; use --context-parallel-size and --use-dynamic-batch-size",
    )
    max_seqlen_per_dp_cp_rank: int | None = flag(
        None,
        "tokens of a GPU with --hybrid-context-parallel",
        not_served="it belongs to --hybrid-context-parallel; use --max-tokens-per-gpu",
    )
    expert_model_parallel_size: int = flag(
        1,
        "GPUs that share the experts (count)",
        at_least=1,
    )
    expert_tensor_parallel_size: int = flag(
        None,
        "GPUs that share each expert's matrices (count; --tensor-model-parallel-size)",
        at_least=1,
    )
    recompute_granularity: str | None = flag(
        None, "what to recompute in the backward pass (nothing)", choices=("full", "selective")
    )
    recompute_method: str | None = flag(
        None, "how --recompute-granularity full chooses layers", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = flag(
        None, "layers per recomputed unit (uniform) or layers recomputed (block) (count)", at_least=1
    )
    recompute_modules: list[str] | None = flag(
        None,
        "what --recompute-granularity selective recomputes (core_attn)",
        choices=("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"),
        nargs="*",
    )
    distribute_saved_activations: bool = flag(
        False, "spread the saved inputs of recomputed layers over the tensor parallel GPUs"
    )
    num_microbatches_with_partial_activation_checkpoints: int | None = flag(
        None,
        "micro-batches that recompute less because memory allows it",
        not_served="the number of micro-batches varies here from step to step; use --recompute-num-layers",
    )


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
        "spread the optimizer state over the data parallel GPUs (on, as slime has it; Megatron-LM's default is off)",
        off=("--no-use-distributed-optimizer",),
    )
    num_distributed_optimizer_instances: int = flag(
        1,
        "copies of the spread optimizer state (count)",
        at_least=1,
        not_served="one copy is served; leave it out",
    )
    overlap_grad_reduce: bool = flag(False, "reduce gradients while the backward pass continues")
    overlap_param_gather: bool = flag(
        False,
        "gather weights while the next forward pass continues; needs --use-distributed-optimizer and"
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
        negated=True,
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
        negated=True,
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
        "share out what --data-parallel-sharding-strategy names over the data parallel GPUs (Megatron-FSDP)",
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
        not_served="there is one level of data parallel GPUs; leave it out",
    )
    suggested_communication_unit_size: int | None = flag(
        None, "Megatron-FSDP: weights in one collective (count; two layers' or 1e9)", at_least=1
    )
    preserve_fp32_weights: bool = flag(
        True,
        "Megatron-FSDP: no fp32 copies of bf16 weights",
        negated=True,
        off=("--no-preserve-fp32-weights",),
        not_served="steps of reinforcement learning are smaller than bf16 can hold; leave it out",
    )
    fsdp_double_buffer: bool = flag(False, "Megatron-FSDP: gather weights into two buffers that stay")
    fsdp_manual_registration: bool = flag(False, "FSDP: register its buffers by hand", not_served=_NCCL)
