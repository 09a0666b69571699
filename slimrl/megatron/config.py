"""Turns flags into megatron-core's configuration objects.

The only place that maps flags to megatron-core fields and disables what the machine does not support (fused kernels
without Transformer Engine). Called by the model, the optimizer and the converters.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from slimrl.algorithms.batch_invariant import operators
from slimrl.arguments.derive import apex_installed, transformer_engine_installed
from slimrl.arguments.flags.kernels import KernelArguments, PrecisionArguments
from slimrl.arguments.flags.optimizer import OptimizerArguments
from slimrl.arguments.flags.parallel import ParallelArguments
from slimrl.arguments.namespace import MegatronArguments
from slimrl.platform import is_cpu


def transformer_impl(kernels: KernelArguments) -> str:
    """`choose_transformer_impl` for --transformer-impl and the machine this process runs on."""
    return choose_transformer_impl(
        kernels.transformer_impl, cuda=not is_cpu(), transformer_engine=transformer_engine_installed()
    )


def choose_transformer_impl(flag: str | None, *, cuda: bool, transformer_engine: bool) -> str:
    """ "transformer_engine" if it is installed and has a GPU, else "local"; --transformer-impl overrides it.

    Raises ValueError if the value of --transformer-impl is not available.
    """
    available = cuda and transformer_engine
    if flag == "transformer_engine" and not available:
        raise ValueError(
            "--transformer-impl transformer_engine: Transformer Engine is not installed or has no GPU here;"
            " install it or leave the flag out"
        )
    if flag is None:
        return "transformer_engine" if available else "local"
    return flag


def fuses_weight_gradients(wanted: bool, layers: str, *, cuda: bool, apex: bool, fsdp: bool) -> bool:
    """Whether linear layers add weight gradients to the gradient buffer inside the matrix product.

    `wanted` is --gradient-accumulation-fusion and `layers` the selected implementation. Transformer Engine's layers
    have their own kernel, megatron-core's use Apex's; without Apex, `patches` builds the latter (the output layer
    besides Transformer Engine's layers) without the fusion. Megatron-FSDP makes layers overwrite the buffer instead of
    adding to it, and keeps an unsharded buffer across micro-batches: only the last one would count.
    """
    return wanted and cuda and not fsdp and (apex or layers == "transformer_engine")


def parameter_dtype(precision: PrecisionArguments) -> torch.dtype:
    """The dtype of the weights: bfloat16 with --bf16, float16 with --fp16, float32 with neither."""
    if precision.bf16:
        return torch.bfloat16
    return torch.float16 if precision.fp16 else torch.float32


def transformer_config(flags: MegatronArguments) -> TransformerConfig:
    """The megatron-core model configuration for `flags`: MLATransformerConfig with --multi-latent-attention.

    Every field is the flag of its name, or of the name in `_FLAG_OF_FIELD`, or set here. Raises ValueError (from
    megatron-core) if the model's shape and the parallel sizes are incompatible.
    """
    config_class = MLATransformerConfig if flags.multi_latent_attention else TransformerConfig
    config = config_class(**_flag_values(config_class, flags) | _model_overrides(flags))
    if flags.true_on_policy_mode:
        # set afterwards: megatron-core only accepts it with the GPU kernels of FlashAttention. slimrl's layers read it.
        config.batch_invariant_mode = True
        config.activation_func = operators.silu
    return config


# megatron-core's field -> slimrl's, if Megatron-LM's flag has another name than the field it sets
_FLAG_OF_FIELD = {
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "gated_linear_unit": "swiglu",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "fp8": "fp8_format",
    "fp8_param": "fp8_param_gather",
    "fp4": "fp4_format",
    "fp4_param": "fp4_param_gather",
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
    "bucket_size": "ddp_bucket_size",
    "pad_buckets_for_high_nccl_busbw": "ddp_pad_buckets_for_high_nccl_busbw",
    "reduce_scatter_with_fp32_accumulation": "ddp_reduce_scatter_with_fp32_accumulation",
    "average_in_collective": "ddp_average_in_collective",
    "check_for_nan_in_grad": "check_for_nan_in_loss_and_grad",
    "nccl_ub": "use_nccl_ub",
    "use_custom_fsdp": "use_megatron_fsdp",
    "moe_router_padding_for_fp8": "moe_router_padding_for_quantization",
}

# fields without a flag: functions and objects of the training loop, and dtypes derived from --bf16/--fp16
_NOT_FLAGS = {
    "timers",
    "finalize_model_grads_func",
    "grad_scale_func",
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
    "init_method",
    "output_layer_init_method",
    "embedding_init_method",
    "activation_func",
    "params_dtype",
    "pipeline_dtype",
    "autocast_dtype",
    "batch_p2p_comm",
    "variable_seq_lengths",
    "bias_activation_fusion",
    "batch_invariant_mode",
    "_cpu_offloading_context",
}
# lists of one that megatron-core takes as a single value
_ONE_OR_MANY = ("moe_aux_loss_coeff", "moe_router_load_balancing_type", "cp_comm_type")


def _flag_values(config_class: type, flags: MegatronArguments) -> dict[str, Any]:
    """Each field of a megatron-core configuration that a flag sets."""
    values = vars(flags)
    found = {}
    for field in dataclasses.fields(config_class):
        if field.name not in _NOT_FLAGS:
            value = values[_FLAG_OF_FIELD.get(field.name, field.name)]
            found[field.name] = value[0] if field.name in _ONE_OR_MANY and value and len(value) == 1 else value
    return found


def _model_overrides(flags: MegatronArguments) -> dict[str, Any]:
    """Fields that depend on the machine, fields that packed samples require, and functions."""
    implementation = transformer_impl(flags)
    fused = implementation == "transformer_engine"
    overlap_stages = flags.overlap_p2p_comm and flags.virtual_pipeline_model_parallel_size is not None
    overrides: dict[str, Any] = {
        "transformer_impl": implementation,
        "attention_backend": AttnBackend[flags.attention_backend],
        "activation_func": F.silu if flags.swiglu else F.gelu,
        "bias_activation_fusion": fused and (flags.bias_swiglu_fusion if flags.swiglu else flags.bias_gelu_fusion),
        # False silently gives wrong gradient norms under tensor parallelism: the weights are never marked as sharded.
        "perform_initialization": True,
        "use_cpu_initialization": False,
        "params_dtype": parameter_dtype(flags),
        "pipeline_dtype": parameter_dtype(flags),
        "sequence_parallel": flags.sequence_parallel and flags.tensor_model_parallel_size > 1,
        "variable_seq_lengths": True,
        "overlap_p2p_comm": overlap_stages,
        # batched exchanges between virtual stages are silently wrong on gloo
        "batch_p2p_comm": not overlap_stages,
        # freed right after an overlapped send starts: gloo has no streams and may read that memory later
        "deallocate_pipeline_outputs": flags.deallocate_pipeline_outputs and not (overlap_stages and is_cpu()),
        "calculate_per_token_loss": True,
        "finalize_model_grads_func": finalize_model_grads,
        "gradient_accumulation_fusion": fuses_weight_gradients(
            flags.gradient_accumulation_fusion,
            implementation,
            cuda=not is_cpu(),
            apex=apex_installed(),
            fsdp=flags.use_megatron_fsdp,
        ),
        # the grouped_gemm package's module stores experts in a layout that no parameter mapping supports
        "moe_grouped_gemm": flags.moe_grouped_gemm and fused,
        "recompute_modules": _recomputed_modules(flags, fused),
    }
    for name in _NEED_TRANSFORMER_ENGINE:
        overrides[name] = vars(flags)[name] and fused
    if flags.rotary_interleaved or flags.mrope_section is not None:
        # for packs the fused kernel rotates halves, by positions that it counts itself
        overrides["apply_rope_fusion"] = False
    if flags.multi_latent_attention:
        overrides["rope_type"] = flags.rope_type or "yarn"
        # fused rotary kernels of latent attention support YaRN only
        overrides["apply_rope_fusion"] = overrides["apply_rope_fusion"] and overrides["rope_type"] == "yarn"
    return overrides


def _recomputed_modules(parallel: ParallelArguments, fused: bool) -> list[str] | None:
    """--recompute-modules without moe_act if there is no grouped GEMM: then the activation is kept."""
    modules = parallel.recompute_modules
    if modules is None:
        return None
    return [module for module in modules if module != "moe_act" or fused]


# kernels only: without them the same values are computed in more steps
_NEED_TRANSFORMER_ENGINE = (
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "fused_single_qkv_rope",
    "masked_softmax_fusion",
    "persist_layer_norm",
    "memory_efficient_layer_norm",
    "moe_permute_fusion",
    "moe_router_fusion",
    "moe_shared_expert_overlap",
    "use_te_activation_func",
    "use_fused_weighted_squared_relu",
)


def kernels_without_effect(flags: MegatronArguments) -> list[str]:
    """Flags that enable a kernel which this machine lacks, so that the reference kernel runs."""
    fused = transformer_impl(flags) == "transformer_engine"
    values = vars(flags)
    names = [name for name in _NEED_TRANSFORMER_ENGINE if values[name] is True and not fused]
    # on by default, so not reported if absent
    wanted = [name for name in names if name not in _ON_BY_DEFAULT]
    if flags.moe_grouped_gemm and not fused:
        wanted.append("moe_grouped_gemm")
    if flags.use_precision_aware_optimizer and not fused and not flags.optimizer_cpu_offload:
        wanted.append("use_precision_aware_optimizer")
    if flags.cp_comm_type is not None and flags.context_parallel_size > 1 and not fused:
        wanted.append("cp_comm_type")
    return ["--" + name.replace("_", "-") for name in wanted]


_ON_BY_DEFAULT = ("bias_dropout_fusion", "apply_rope_fusion", "masked_softmax_fusion", "persist_layer_norm")


def ddp_config(flags: MegatronArguments) -> DistributedDataParallelConfig:
    """How gradients are stored and reduced over data-parallel ranks."""
    values = _flag_values(DistributedDataParallelConfig, flags)
    values["grad_reduce_in_fp32"] = flags.accumulate_allreduce_grads_in_fp32 or (
        flags.bf16 and not flags.grad_reduce_in_bf16
    )
    # Stages without virtual stages gather their weights one by one; only virtual ones can be aligned.
    values["align_param_gather"] = flags.align_param_gather and flags.virtual_pipeline_model_parallel_size is not None
    values["check_for_nan_in_grad"] = False  # the gradient norm is checked instead, after the reduction
    return DistributedDataParallelConfig(**values)


def optimizer_config(flags: MegatronArguments) -> OptimizerConfig:
    """The optimizer's settings; the scheduler sets learning rate and weight decay."""
    fused = transformer_impl(flags) == "transformer_engine"
    values = _flag_values(OptimizerConfig, flags)
    for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        values[name] = _DTYPES[values[name]]
    values["params_dtype"] = parameter_dtype(flags)
    # An infinite bound clips nothing, but the norm is still computed.
    values["clip_grad"] = flags.clip_grad if flags.clip_grad > 0 else math.inf
    # with the state in host memory it is no kernel of Transformer Engine's, but the way gradients are handed over
    values["use_precision_aware_optimizer"] = flags.use_precision_aware_optimizer and (
        fused or flags.optimizer_cpu_offload
    )
    values["fp8_recipe"] = flags.fp8_recipe if flags.fp8_format is not None else None
    return OptimizerConfig(**values)


# megatron-core keeps fp8 state as bytes
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}


def total_optimizer_steps(num_rollout: int | None, num_steps_per_rollout: int | None) -> int:
    """Optimizer steps of the whole run: rollouts x steps per rollout.

    Raises ValueError if the number of rollouts is not known yet.
    """
    if num_rollout is None or num_steps_per_rollout is None:
        raise ValueError(
            f"--num-rollout is {num_rollout} and --num-steps-per-rollout {num_steps_per_rollout}: the"
            " learning rate schedule needs both when training starts"
        )
    return num_rollout * num_steps_per_rollout


def parameter_scheduler(
    flags: OptimizerArguments,
    optimizer: MegatronOptimizer,
    *,
    num_rollout: int | None,
    num_steps_per_rollout: int | None,
) -> OptimizerParamScheduler:
    """Learning rate and weight decay as functions of the optimizer step; `.step(1)` after each step.

    The decay takes --lr-decay-iters steps, else the whole run; the warm-up --lr-warmup-fraction of that, else
    --lr-warmup-iters steps.
    """
    decay_steps = flags.lr_decay_iters
    if decay_steps is None:
        decay_steps = total_optimizer_steps(num_rollout, num_steps_per_rollout)
    warmup_steps = flags.lr_warmup_iters
    if flags.lr_warmup_fraction is not None:
        warmup_steps = int(flags.lr_warmup_fraction * decay_steps)
    # The scheduler wants the decay to end after the warm-up even for a run of one step.
    return OptimizerParamScheduler(
        optimizer,
        init_lr=flags.lr_warmup_init,
        max_lr=flags.lr,
        min_lr=flags.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=max(decay_steps, warmup_steps + 1),
        lr_decay_style=flags.lr_decay_style,
        start_wd=flags.weight_decay if flags.start_weight_decay is None else flags.start_weight_decay,
        end_wd=flags.weight_decay if flags.end_weight_decay is None else flags.end_weight_decay,
        wd_incr_steps=max(decay_steps, 1),
        wd_incr_style=flags.weight_decay_incr_style,
        wsd_decay_steps=flags.lr_wsd_decay_iters,
        lr_wsd_decay_style=flags.lr_wsd_decay_style,
        # The flags of this run override those in a checkpoint; only the step count is loaded from it.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
