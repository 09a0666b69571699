"""Flags of GPUs and placement and, in Megatron-LM's spelling, of parallelism, recomputation, gradients and sharding.

On a machine without GPUs they count logical GPUs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class ClusterArguments:
    """GPUs, placement and process groups."""

    actor_num_nodes: int = flag(1, "training nodes (count)", at_least=1)
    actor_num_gpus_per_node: int = flag(
        8, "training GPUs on each of these nodes (count); the training world size is nodes x this", at_least=1
    )
    rollout_num_gpus: int = flag(
        None,
        "GPUs of all inference engines together (count; with --colocate the training GPUs, else required)",
        at_least=1,
    )
    rollout_max_num_gpus: int | None = flag(
        None,
        "--use-fault-tolerance: engines on further GPUs join the running job, up to this number of rollout GPUs, "
        "whenever Ray has GPUs free, and may be lost, as on spot machines (count; no more than --rollout-num-gpus)",
        at_least=1,
    )
    rollout_num_gpus_per_engine: int = flag(
        1, "GPUs of one SGLang engine: its tensor parallel size x --sglang-pp-size (count)", at_least=1
    )
    num_gpus_per_node: int = flag(8, "GPUs per node (count); an engine that needs more takes whole nodes", at_least=1)
    colocate: bool = flag(False, "train and generate on the same GPUs (on separate GPUs)")
    offload: bool = flag(False, "short for --offload-train --offload-rollout")
    offload_train: bool | None = flag(
        None,
        "offload the training state to host memory during generation (on with --colocate)",
        off=("--no-offload-train",),
    )
    offload_train_nccl: bool = flag(
        True,
        "keep NCCL's buffers on the device while training is offloaded, and set NCCL_CUMEM_ENABLE=0 unless it is set:"
        " for machines where NCCL hangs with cuMem (GPUs on PCIe, NVIDIA/nccl#2379)",
        negated=True,
        off=("--no-offload-train-nccl",),
    )
    offload_rollout: bool | None = flag(
        None, "release the engines' memory during training (on with --colocate)", off=("--no-offload-rollout",)
    )
    distributed_backend: str | None = flag(
        None,
        "torch.distributed backend of the training processes (nccl on GPUs, gloo on CPU)",
        choices=("nccl", "gloo"),
        not_served="the backend follows from the machine; leave it out",
    )
    distributed_timeout_minutes: int = flag(10, "timeout of one training collective (minutes)", at_least=1)
    watchdog_report_seconds: float = flag(
        300.0,
        "after a wait of this length log what the driver waits for and where each process is; again each time the wait"
        " has doubled (seconds; 0: never)",
        at_least=0,
    )
    watchdog_limit_seconds: float | None = flag(
        None, "end the run with that report after a single wait of this length (seconds; never)", above=0
    )
    node_timeout_seconds: float = flag(
        20.0,
        "end the run, to be resumed, when a node that it cannot replace has not answered on the network for this long"
        " (seconds; Ray declares it dead after more than a minute)",
        at_least=15,
    )
    train_backend: str = flag("megatron", "training backend", choices=("megatron",))
    release_train: bool = flag(
        False,
        "end the training processes during generation, and restart them from a checkpoint",
        not_served="training processes stay; use --offload-train, which offloads them from the device",
    )
    custom_megatron_init_path: str | None = flag(
        None,
        "function that runs on every training rank after Megatron's initialisation (dotted import path)",
    )
    train_env_vars: dict[str, Any] = flag(
        {}, "environment variables of training processes, not of engines (JSON object)"
    )

    @property
    def actor_num_gpus(self) -> int:
        """GPUs of the whole training group."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node


@dataclasses.dataclass
class ParallelArguments:
    """Parallel layout and recomputation."""

    tensor_model_parallel_size: int = flag(1, "GPUs over which each layer's matrices are sharded (count)", at_least=1)
    sequence_parallel: bool = flag(
        False, "shard norm activations over the tensor parallel GPUs (ignored if tensor parallel size is 1)"
    )
    pipeline_model_parallel_size: int = flag(1, "pipeline stages (count)", at_least=1)
    decoder_first_pipeline_num_layers: int | None = flag(
        None,
        "layers of the first pipeline stage (count; an even split)",
        at_least=1,
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None,
        "layers of the last pipeline stage (count; an even split)",
        at_least=1,
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        "layers per virtual stage, of which each GPU has several (count; one stage per GPU)",
        at_least=1,
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None,
        "virtual stages per pipeline rank (count); instead of --num-layers-per-virtual-pipeline-stage",
        at_least=1,
    )
    microbatch_group_size_per_vp_stage: int | None = flag(
        None, "consecutive micro-batches of a virtual stage (count; pipeline stages)", at_least=1
    )
    pipeline_model_parallel_layout: str | None = flag(
        None,
        "layers of every stage as a string, such as Et*3|(tt|)*2L",
        not_served="use --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers instead",
    )
    account_for_embedding_in_pipeline_split: bool = flag(False, "count the embedding as one layer of the first stage")
    account_for_loss_in_pipeline_split: bool = flag(False, "count the output layer as one layer of the last stage")
    context_parallel_size: int = flag(
        1,
        "GPUs over which each sample's tokens are sharded (count)",
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
        not_served="only one level of context parallelism is supported; use --context-parallel-size alone",
    )
    hybrid_context_parallel: bool = flag(
        False,
        "choose the context parallel size per sample",
        not_served="samples are packed instead; use --context-parallel-size and --use-dynamic-batch-size",
    )
    max_seqlen_per_dp_cp_rank: int | None = flag(
        None,
        "tokens per GPU with --hybrid-context-parallel",
        not_served="it belongs to --hybrid-context-parallel; use --max-tokens-per-gpu",
    )
    expert_model_parallel_size: int = flag(
        1,
        "GPUs over which experts are distributed (count)",
        at_least=1,
    )
    expert_tensor_parallel_size: int = flag(
        None,
        "GPUs over which each expert's matrices are sharded (count; --tensor-model-parallel-size)",
        at_least=1,
    )
    recompute_granularity: str | None = flag(
        None, "activations to recompute in the backward pass (none)", choices=("full", "selective")
    )
    recompute_method: str | None = flag(
        None, "layer selection of --recompute-granularity full", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = flag(
        None, "layers per recomputed unit (uniform) or recomputed layers (block) (count)", at_least=1
    )
    recompute_modules: list[str] | None = flag(
        None,
        "modules that --recompute-granularity selective recomputes (core_attn)",
        choices=("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"),
        nargs="*",
    )
    distribute_saved_activations: bool = flag(
        False, "shard the saved inputs of recomputed layers over the tensor parallel GPUs"
    )
    num_microbatches_with_partial_activation_checkpoints: int | None = flag(
        None,
        "micro-batches with partial recomputation",
        not_served="the number of micro-batches varies from step to step; use --recompute-num-layers",
    )


_NCCL = "registering Megatron-FSDP's buffers with NCCL is not tested; leave it out"


@dataclasses.dataclass
class GradientArguments:
    """Data parallel gradients."""

    accumulate_allreduce_grads_in_fp32: bool = flag(
        False,
        "accumulate and reduce gradients in fp32 (on with --bf16 unless --grad-reduce-in-bf16)",
        spellings=("--grad-reduce-in-fp32",),
    )
    grad_reduce_in_bf16: bool = flag(
        False, "accumulate and reduce gradients in bf16 instead of fp32, with --bf16: half the memory, less precision"
    )
    use_distributed_optimizer: bool = flag(
        True,
        "shard the optimizer state over the data parallel GPUs (on, as in slime; Megatron-LM's default is off)",
        off=("--no-use-distributed-optimizer",),
    )
    num_distributed_optimizer_instances: int = flag(
        1,
        "copies of the sharded optimizer state (count)",
        at_least=1,
        not_served="only one copy is supported; leave it out",
    )
    overlap_grad_reduce: bool = flag(False, "reduce gradients while the backward pass continues")
    overlap_param_gather: bool = flag(
        False,
        "gather weights while the next forward pass continues; needs --use-distributed-optimizer and"
        " --overlap-grad-reduce",
    )
    overlap_param_gather_with_optimizer_step: bool = flag(
        False,
        "gather weights during the optimizer step",
        not_served="it requires virtual pipeline stages without log-probability passes; leave it out",
    )
    align_param_gather: bool = flag(
        True,
        "let pipeline stages gather weights independently",
        negated=True,
        off=("--no-align-param-gather",),
    )
    ddp_bucket_size: int | None = flag(None, "elements per gradient bucket (count; by data parallel size)", at_least=1)
    ddp_num_buckets: int | None = flag(None, "gradient buckets (count)", at_least=1, not_served="use --ddp-bucket-size")
    ddp_pad_buckets_for_high_nccl_busbw: bool = flag(False, "pad buckets to sizes with high NCCL bandwidth")
    ddp_reduce_scatter_with_fp32_accumulation: bool = flag(False, "accumulate 16-bit reduce-scatters in fp32")
    ddp_average_in_collective: bool = flag(
        False,
        "average within the collective",
        not_served="losses are divided by the number of tokens or samples of the step; leave it out",
    )
    gradient_reduce_div_fusion: bool = flag(
        True,
        "divide gradients separately from the reduction",
        negated=True,
        off=("--no-gradient-reduce-div-fusion",),
        not_served="losses are divided by the number of tokens or samples of the step; leave it out",
    )
    check_for_large_grads: bool = flag(
        False,
        "stop if a gradient is unexpectedly large",
        not_served="the gradient norm is in the log of each step; leave it out",
    )
    use_nccl_ub: bool = flag(False, "registered NCCL buffers", spellings=("--nccl-ub",), not_served=_NCCL)
    disable_symmetric_registration: bool = flag(False, "plain registration of NCCL buffers", not_served=_NCCL)
    use_megatron_fsdp: bool = flag(
        False,
        "Megatron-FSDP: shard the state of --data-parallel-sharding-strategy over the data parallel GPUs",
        spellings=("--use-custom-fsdp",),
    )
    data_parallel_sharding_strategy: str = flag(
        "no_shard",
        "state that Megatron-FSDP shards: optimizer state, also gradients, also weights (ZeRO-1, 2, 3)",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    outer_dp_sharding_strategy: str = flag(
        "no_shard",
        "state that Megatron-FSDP's outer level shards",
        choices=("no_shard", "optim"),
        not_served="only one level of data parallel GPUs is supported; leave it out",
    )
    suggested_communication_unit_size: int | None = flag(
        None, "Megatron-FSDP: weights per collective (count; those of two layers, or 1e9)", at_least=1
    )
    preserve_fp32_weights: bool = flag(
        True,
        "Megatron-FSDP: no fp32 copies of bf16 weights",
        negated=True,
        off=("--no-preserve-fp32-weights",),
        not_served="optimizer steps of reinforcement learning are below the precision of bf16; leave it out",
    )
    fsdp_double_buffer: bool = flag(False, "Megatron-FSDP: gather weights into two persistent buffers")
    fsdp_manual_registration: bool = flag(False, "FSDP: register its buffers manually", not_served=_NCCL)
