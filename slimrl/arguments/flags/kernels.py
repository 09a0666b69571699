"""Flags of number formats below 32 bits, and of fused kernels, overlapped communication and CUDA graphs.

The formats are bf16, fp16 with loss scaling, fp8 and fp4. The other flags do not change the computation.
If a kernel's package is missing, megatron-core's unfused implementation runs and a log line says so.
"""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag

_WHOLE_TENSORS = (
    "weight updates, offloading and the copy of the reference take weights of one dtype; leave it out: matrix products"
    " are in fewer bits without it"
)
_KITCHEN = "it needs NVIDIA's internal Kitchen package; use --fp8-format with Transformer Engine"
_FACTORY = "custom quantizers are unsupported; use one of the recipes"


@dataclasses.dataclass
class PrecisionArguments:
    """Number formats."""

    bf16: bool = flag(
        False,
        "train in bfloat16 with fp32 master weights (without --bf16, --no-bf16 and --fp16: the dtype in config.json of"
        " --hf-checkpoint)",
        off=("--no-bf16",),
    )
    fp16: bool = flag(False, "train in float16 with fp32 master weights and loss scaling")
    loss_scale: float | None = flag(None, "fixed loss scale of --fp16, a power of two (dynamic)", above=0)
    initial_loss_scale: float = flag(2.0**32, "initial dynamic loss scale", above=0)
    min_loss_scale: float = flag(1.0, "minimum dynamic loss scale", above=0)
    loss_scale_window: float = flag(1000.0, "steps without overflow before the loss scale is doubled", above=0)
    hysteresis: int = flag(2, "overflows in a row before the loss scale is halved (count)", at_least=1)
    fp32_residual_connection: bool = flag(False, "keep the residual stream in fp32")
    enable_autocast: bool = flag(
        False,
        "run layers under torch.autocast",
        not_served="weights have the dtype of the computation; use --bf16",
    )
    disable_bf16_reduced_precision_matmul: bool = flag(False, "accumulate bf16 matrix products in fp32 on the GPU")
    first_last_layers_bf16: bool = flag(False, "keep the first and the last layers in bf16 under fp8")
    num_layers_at_start_in_bf16: int = flag(1, "first layers kept in bf16 (count)", at_least=0)
    num_layers_at_end_in_bf16: int = flag(1, "last layers kept in bf16 (count)", at_least=0)
    fp8_format: str | None = flag(
        None, "compute matrix products in fp8, with Transformer Engine (no fp8)", choices=("e4m3", "hybrid")
    )
    fp8_recipe: str = flag(
        "delayed",
        "method for fp8 scales",
        choices=("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
        not_served=_FACTORY,
        served=("tensorwise", "delayed", "mxfp8", "blockwise"),
    )
    fp8_param_gather: bool = flag(False, "also keep the compute copy of weights in fp8", not_served=_WHOLE_TENSORS)
    fp8_margin: int = flag(0, "margin of fp8 scales below the largest value (exponent of 2)")
    fp8_interval: int = flag(
        1, "steps between two updates of scales", not_served="Transformer Engine updates every step; leave it out"
    )
    fp8_amax_history_len: int = flag(1, "history of delayed scales (steps)", at_least=1)
    fp8_amax_compute_algo: str = flag(
        "most_recent", "value of that history for delayed scales", choices=("most_recent", "max")
    )
    fp8_wgrad: bool = flag(
        True, "compute weight gradients in higher precision than fp8", negated=True, off=("--no-fp8-wgrad",)
    )
    fp8_dot_product_attention: bool = flag(False, "attention's matrix products in fp8")
    fp8_multi_head_attention: bool = flag(False, "the whole attention block in fp8")
    fp8_quantizer_factory: str | None = flag(None, "function that makes an fp8 quantizer", not_served=_FACTORY)
    keep_fp8_transpose_cache: bool = flag(
        False,
        "FSDP: keep the transposed fp8 weights",
        not_served="Megatron-FSDP does not support --fp8-param-gather; leave it out",
    )
    tp_only_amax_red: bool = flag(False, "reduce fp8 scales over tensor parallel GPUs only")
    reuse_grad_buf_for_mxfp8_param_ag: bool = flag(
        False,
        "gather mxfp8 weights into the gradients' memory",
        not_served="it is for --fp8-param-gather; leave it out",
    )
    fp4_format: str | None = flag(None, "compute matrix products in fp4 (no fp4)", choices=("e2m1",))
    fp4_recipe: str = flag(
        "nvfp4", "method for fp4 scales", choices=("nvfp4", "custom"), not_served=_FACTORY, served=("nvfp4",)
    )
    fp4_param_gather: bool = flag(
        False, "also keep the compute copy of weights in fp4", spellings=("--fp4-param",), not_served=_WHOLE_TENSORS
    )
    fp4_quantizer_factory: str | None = flag(None, "function that makes an fp4 quantizer", not_served=_FACTORY)
    use_kitchen: bool = flag(False, "NVIDIA's Kitchen quantisation library", not_served=_KITCHEN)
    use_kitchen_attention: bool = flag(False, "Kitchen's attention", not_served=_KITCHEN)
    kitchen_attention_backend: str = flag(
        "sdpa", "kernel of Kitchen's attention", choices=("sdpa", "fa"), not_served=_KITCHEN
    )
    quant_recipe: str | None = flag(
        None, "Kitchen: file of per-layer recipes", spellings=("--kitchen-config-file",), not_served=_KITCHEN
    )


_GRAPHS = "CUDA graphs need inputs of one size, and packed batches vary; leave it out"
_INFERENCE = "SGLang generates; leave it out"
_TP_OVERLAP = "Megatron-LM's start-up code creates its buffers, and slimrl does not use that code; leave it out"
_OF_TP_OVERLAP = "it belongs to --tp-comm-overlap; leave it out"


@dataclasses.dataclass
class KernelArguments:
    """Kernels, overlap and CUDA graphs."""

    transformer_impl: str | None = flag(
        None,
        "layer implementation (default: transformer_engine if it is installed, without --lora-rank and"
        " --true-on-policy-mode; else local)",
        choices=("local", "transformer_engine", "inference_optimized"),
        not_served="it is for generation, and SGLang generates; leave it out",
        served=("local", "transformer_engine"),
    )
    attention_backend: str = flag(
        "auto", "attention kernel of Transformer Engine", choices=("auto", "flash", "fused", "unfused", "local")
    )
    attention_softmax_in_fp32: bool = flag(False, "compute the attention softmax in fp32")
    apply_query_key_layer_scaling: bool = flag(
        False, "divide attention logits by the layer's number, in fp32 (for fp16)"
    )
    masked_softmax_fusion: bool = flag(
        True, "do not fuse scaling, mask and softmax", negated=True, off=("--no-masked-softmax-fusion",)
    )
    bias_swiglu_fusion: bool = flag(True, "do not fuse bias and SwiGLU", negated=True, off=("--no-bias-swiglu-fusion",))
    bias_gelu_fusion: bool = flag(True, "do not fuse bias and GELU", negated=True, off=("--no-bias-gelu-fusion",))
    bias_dropout_fusion: bool = flag(
        True, "do not fuse bias and dropout", negated=True, off=("--no-bias-dropout-fusion",)
    )
    apply_rope_fusion: bool = flag(True, "do not use the fused rotary kernel", negated=True, off=("--no-rope-fusion",))
    fused_single_qkv_rope: bool = flag(
        False,
        "one rotary kernel for queries, keys and values together",
        not_served="megatron-core has it for samples that are not packed only; leave it out",
    )
    persist_layer_norm: bool = flag(
        True, "do not use the persistent fused norm", negated=True, off=("--no-persist-layer-norm",)
    )
    memory_efficient_layer_norm: bool = flag(False, "norms that recompute their input in the backward pass")
    gradient_accumulation_fusion: bool = flag(
        True,
        "do not accumulate weight gradients inside the matrix product kernel",
        negated=True,
        off=("--no-gradient-accumulation-fusion",),
    )
    use_fused_weighted_squared_relu: bool = flag(False, "fused kernel of --squared-relu in experts")
    use_te_activation_func: bool = flag(False, "Transformer Engine's activation functions")
    cross_entropy_loss_fusion: bool = flag(
        False,
        "Megatron's fused cross entropy",
        not_served="slimrl has its own kernel for log-probabilities and entropy; leave it out",
    )
    cross_entropy_fusion_impl: str = flag(
        "native",
        "implementation of --cross-entropy-loss-fusion",
        choices=("native", "te"),
        not_served="it belongs to --cross-entropy-loss-fusion; leave it out",
    )
    deterministic_mode: bool = flag(
        False,
        "use deterministic kernels and collectives on every rank; an operation without one ends the run; slower on"
        " GPUs",
    )
    true_on_policy_mode: bool = flag(
        False,
        "train and rollout log-probabilities are equal to the last bit: batch-invariant operators, on CPUs in float32,"
        " on GPUs in bfloat16 (not run yet)",
        spellings=("--true-on-policy",),
    )
    attn_implementation: str | None = flag(
        None,
        "flash_attention_3: slime's name of the attention that --true-on-policy-mode has on GPUs anyway; otherwise use"
        " --attention-backend",
    )
    batch_invariant_mode: bool = flag(
        False,
        "kernels whose result for a row does not depend on the rest of the batch",
        not_served="megatron-core's kernels need Transformer Engine; use --true-on-policy-mode, for engines alone"
        " --sglang-enable-deterministic-inference",
    )
    async_tensor_model_parallel_allreduce: bool = flag(
        True,
        "wait for the input gradient's reduction before the weight gradient",
        negated=True,
        off=("--no-async-tensor-model-parallel-allreduce",),
        not_served="megatron-core always overlaps the two; leave it out",
    )
    tp_comm_overlap: bool = flag(
        False, "overlap tensor parallel communication with matrix products", not_served=_TP_OVERLAP
    )
    tp_comm_bulk_wgrad: bool = flag(
        True,
        "no overlap of the weight gradient",
        negated=True,
        off=("--disable-tp-comm-bulk-wgrad",),
        not_served=_OF_TP_OVERLAP,
    )
    tp_comm_bulk_dgrad: bool = flag(
        True,
        "no overlap of the input gradient",
        negated=True,
        off=("--disable-tp-comm-bulk-dgrad",),
        not_served=_OF_TP_OVERLAP,
    )
    tp_comm_overlap_ag: bool = flag(
        True,
        "no overlap of the all-gather",
        negated=True,
        off=("--disable-tp-comm-overlap-ag",),
        not_served=_OF_TP_OVERLAP,
    )
    tp_comm_overlap_rs: bool = flag(
        True,
        "no overlap of the reduce-scatter",
        negated=True,
        off=("--disable-tp-comm-overlap-rs",),
        not_served=_OF_TP_OVERLAP,
    )
    tp_comm_overlap_rs_dgrad: bool = flag(
        False, "overlap the reduce-scatter of the input gradient", not_served=_OF_TP_OVERLAP
    )
    tp_comm_split_ag: bool = flag(
        True,
        "do not split the all-gather",
        negated=True,
        off=("--disable-tp-comm-split-ag",),
        not_served=_OF_TP_OVERLAP,
    )
    tp_comm_split_rs: bool = flag(
        True,
        "do not split the reduce-scatter",
        negated=True,
        off=("--disable-tp-comm-split-rs",),
        not_served=_OF_TP_OVERLAP,
    )
    tp_comm_atomic_ag: bool = flag(False, "all-gather by atomic matrix products", not_served=_OF_TP_OVERLAP)
    tp_comm_atomic_rs: bool = flag(False, "reduce-scatter by atomic matrix products", not_served=_OF_TP_OVERLAP)
    tp_comm_overlap_disable_qkv: bool = flag(
        False, "no overlap in the query, key and value projection", not_served=_OF_TP_OVERLAP
    )
    tp_comm_overlap_disable_fc1: bool = flag(
        False, "no overlap in the first feed-forward projection", not_served=_OF_TP_OVERLAP
    )
    tp_comm_bootstrap_backend: str = flag(
        "nccl", "backend that bootstraps the overlap", choices=("nccl", "mpi", "gloo"), not_served=_OF_TP_OVERLAP
    )
    symmetric_ar_type: str | None = flag(
        None,
        "all-reduce in symmetric memory",
        choices=("two_shot", "one_shot", "multimem_all_reduce"),
        not_served=_INFERENCE,
    )
    overlap_p2p_comm: bool = flag(
        True,
        "do not overlap the exchange between virtual pipeline stages with computation",
        negated=True,
        off=("--no-overlap-p2p-communication",),
    )
    overlap_p2p_comm_warmup_flush: bool = flag(
        False, "also overlap the exchange in warm-up and flush", spellings=("--overlap-p2p-communication-warmup-flush",)
    )
    batch_p2p_sync: bool = flag(
        True, "do not synchronise after a batched exchange", negated=True, off=("--no-batch-p2p-sync",)
    )
    use_ring_exchange_p2p: bool = flag(
        False, "ring exchange between stages", not_served="it needs NVIDIA's build of torch; leave it out"
    )
    pipeline_model_parallel_comm_backend: str | None = flag(
        None,
        "backend between pipeline stages (that of the process group)",
        choices=("nccl", "ucc"),
        not_served="stages use the backend of the training processes; leave it out",
    )
    deallocate_pipeline_outputs: bool = flag(
        True,
        "keep a stage's output in memory after sending it",
        negated=True,
        off=("--no-deallocate-pipeline-outputs",),
    )
    defer_embedding_wgrad_compute: bool = flag(
        False,
        "compute the output layer's weight gradient while the pipeline drains",
        not_served="slimrl's log-probability kernel computes the output layer; leave it out",
    )
    wgrad_deferral_limit: int = flag(
        0, "micro-batches of deferral", not_served="it belongs to --defer-embedding-wgrad-compute; leave it out"
    )
    barrier_with_L1_time: bool = flag(
        True,
        "do not wait for all GPUs at each outermost timer",
        negated=True,
        off=("--no-barrier-with-level-1-timing",),
        not_served="slimrl does not use megatron-core's timers; leave it out",
    )
    use_te_rng_tracker: bool = flag(
        False,
        "Transformer Engine's random number states",
        spellings=("--te-rng-tracker",),
        not_served="only CUDA graphs need it; leave it out",
    )
    inference_rng_tracker: bool = flag(False, "random number states for generation", not_served=_INFERENCE)
    inference_sampling_seed: int = flag(42, "seed of Megatron's generation", not_served=_INFERENCE)
    inference_fuse_tp_communication: bool = flag(False, "fused communication in generation", not_served=_INFERENCE)
    use_inference_optimized_layers: bool = flag(False, "layers for generation", not_served=_INFERENCE)
    flash_decode: bool = flag(False, "decoding kernel for Megatron's generation", not_served=_INFERENCE)
    mlp_chunks_for_prefill: int = flag(1, "pieces of the feed-forward block in prefill", not_served=_INFERENCE)
    clone_scatter_output_in_embedding: bool = flag(
        True,
        "keep the whole embedding output in memory instead of copying the local part",
        negated=True,
        off=("--no-clone-scatter-output-in-embedding",),
    )
    disable_parameter_transpose_cache: bool = flag(False, "do not keep transposed weights")
    enable_cuda_graph: bool = flag(False, "run layers as CUDA graphs", not_served=_GRAPHS)
    external_cuda_graph: bool = flag(False, "capture CUDA graphs outside of layers", not_served=_GRAPHS)
    cuda_graph_impl: str = flag(
        "none", "implementation of CUDA graphs", choices=("none", "local", "transformer_engine"), not_served=_GRAPHS
    )
    cuda_graph_scope: str = flag("full", "part of a layer in a CUDA graph", not_served=_GRAPHS)
    cuda_graph_use_single_mempool: bool = flag(False, "one memory pool for all CUDA graphs", not_served=_GRAPHS)
    cuda_graph_retain_backward_graph: bool = flag(False, "keep the backward graph while capturing", not_served=_GRAPHS)
    cuda_graph_warmup_steps: int = flag(3, "steps before graphs are captured (count)", not_served=_GRAPHS)
