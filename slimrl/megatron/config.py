"""Turns flags into megatron-core's configuration objects.

Promises one place where a flag meets a megatron-core field; what the machine cannot do (fused kernels without
Transformer Engine) is switched off here and nowhere else. Called by the model, the optimizer and the converters.
"""

from __future__ import annotations

import importlib.util
import math

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from slimrl.arguments import Arguments
from slimrl.platform import is_cpu


def transformer_impl(args: Arguments) -> str:
    """ "transformer_engine" where it is installed and has a GPU, else "local"; --transformer-impl decides if given.

    Raises ValueError where --transformer-impl asks for what is not there.
    """
    available = not is_cpu() and importlib.util.find_spec("transformer_engine") is not None
    if args.transformer_impl == "transformer_engine" and not available:
        raise ValueError(
            "--transformer-impl transformer_engine: Transformer Engine is not installed or has no GPU here;"
            " install it or leave the flag out"
        )
    if args.transformer_impl is None:
        return "transformer_engine" if available else "local"
    return args.transformer_impl


def parameter_dtype(args: Arguments) -> torch.dtype:
    """The dtype of the weights: bfloat16 with --bf16, float16 with --fp16, float32 with neither."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else torch.float32


def _has_fused_weight_gradient() -> bool:
    """True where the kernel that adds weight gradients inside the matrix product is installed (NVIDIA Apex)."""
    return not is_cpu() and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def transformer_config(args: Arguments) -> TransformerConfig:
    """The megatron-core model configuration for `args`.

    Raises ValueError (from megatron-core) where the shape and the parallel sizes do not fit each other.
    """
    implementation = transformer_impl(args)
    fused = implementation == "transformer_engine"
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        transformer_impl=implementation,
        attention_backend=AttnBackend[args.attention_backend],
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        qk_layernorm=args.qk_layernorm,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else F.gelu,
        bias_activation_fusion=args.swiglu and fused,
        bias_dropout_fusion=fused,
        apply_rope_fusion=args.apply_rope_fusion and fused,
        masked_softmax_fusion=args.masked_softmax_fusion and fused,
        gradient_accumulation_fusion=args.gradient_accumulation_fusion and _has_fused_weight_gradient(),
        persist_layer_norm=fused,
        rotary_interleaved=args.rotary_interleaved,
        attention_dropout=args.attention_dropout,
        hidden_dropout=args.hidden_dropout,
        attention_softmax_in_fp32=args.attention_softmax_in_fp32,
        init_method_std=args.init_method_std,
        # False silently gives wrong gradient norms under tensor parallelism: the weights are never marked as sharded.
        perform_initialization=True,
        use_cpu_initialization=False,
        params_dtype=parameter_dtype(args),
        pipeline_dtype=parameter_dtype(args),
        bf16=args.bf16,
        fp16=args.fp16,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        sequence_parallel=args.sequence_parallel and args.tensor_model_parallel_size > 1,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the one that takes sequences of any length
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
    )


def ddp_config(args: Arguments) -> DistributedDataParallelConfig:
    """How gradients are kept and reduced over data-parallel ranks."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32 or args.bf16,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )


def optimizer_config(args: Arguments) -> OptimizerConfig:
    """The optimizer's own settings; learning rate and weight decay are driven by the scheduler."""
    return OptimizerConfig(
        optimizer=args.optimizer,
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        # An infinite bound clips nothing but still has the norm computed.
        clip_grad=args.clip_grad if args.clip_grad > 0 else math.inf,
        params_dtype=parameter_dtype(args),
        bf16=args.bf16,
        fp16=args.fp16,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )


def total_optimizer_steps(args: Arguments) -> int:
    """Optimizer steps of the whole run: rollouts x steps per rollout.

    Raises ValueError where the number of rollouts is not known yet.
    """
    if args.num_rollout is None or args.num_steps_per_rollout is None:
        raise ValueError(
            f"--num-rollout is {args.num_rollout} and --num-steps-per-rollout {args.num_steps_per_rollout}: the"
            " learning rate schedule needs both when training starts"
        )
    return args.num_rollout * args.num_steps_per_rollout


def parameter_scheduler(args: Arguments, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Learning rate and weight decay as functions of the optimizer step; `.step(1)` after each step.

    The decay takes --lr-decay-iters steps, else the whole run; the warm-up --lr-warmup-fraction of that, else
    --lr-warmup-iters steps.
    """
    decay_steps = args.lr_decay_iters if args.lr_decay_iters is not None else total_optimizer_steps(args)
    warmup_steps = args.lr_warmup_iters
    if args.lr_warmup_fraction is not None:
        warmup_steps = int(args.lr_warmup_fraction * decay_steps)
    # The scheduler wants the decay to end after the warm-up even for a run of one step.
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=max(decay_steps, warmup_steps + 1),
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=max(decay_steps, 1),
        wd_incr_style="constant",
        # The flags of this run win over those stored in a checkpoint; only the step count is taken from it.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
