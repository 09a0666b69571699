"""Flags of the optimizer, its learning rate schedule, and offloading of training state to host memory.

Every schedule counts optimizer steps.
"""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class OptimizerArguments:
    """Optimizer and schedule."""

    optimizer: str = flag(
        "adam",
        "optimizer: adam (with decoupled weight decay: AdamW), sgd (weight decay added to the gradient), or muon for"
        " matrices with adam for embedding, output layer, norms and biases",
        choices=("adam", "sgd", "muon", "dist_muon"),
        not_served="megatron-core 0.16.1 cannot load its state into another number of GPUs; use --optimizer muon",
        served=("sgd", "muon"),
        hints={"adamw": "give adam, whose weight decay is decoupled (AdamW)"},
    )
    lr: float = flag(1e-6, "learning rate after warm-up", at_least=0)
    min_lr: float = flag(0.0, "learning rate at the end of the decay", at_least=0)
    decoupled_lr: float | None = flag(None, "learning rate of the embedding and the output layer (--lr)", at_least=0)
    decoupled_min_lr: float | None = flag(None, "final value of --decoupled-lr (--min-lr)", at_least=0)
    lr_decay_style: str = flag(
        "linear", "shape of the decay", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: int | None = flag(
        None, "optimizer steps until --min-lr is reached (steps of the whole run)", at_least=1
    )
    lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up (count)", at_least=0)
    lr_warmup_fraction: float | None = flag(
        None, "warm-up as a fraction of --lr-decay-iters; instead of --lr-warmup-iters", at_least=0, at_most=1
    )
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warm-up", at_least=0)
    lr_wsd_decay_iters: int | None = flag(
        None, "WSD: optimizer steps of the decay at the end of --lr-decay-iters (count)", at_least=1
    )
    lr_wsd_decay_style: str = flag(
        "exponential", "WSD: shape of that decay", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    weight_decay: float = flag(0.01, "weight decay of matrices (biases and norms have none)", at_least=0)
    start_weight_decay: float | None = flag(None, "weight decay at the start (--weight-decay)", at_least=0)
    end_weight_decay: float | None = flag(None, "weight decay at the end (--weight-decay)", at_least=0)
    weight_decay_incr_style: str = flag(
        "constant", "shape of the change between the two", choices=("constant", "linear", "cosine")
    )
    apply_wd_to_qk_layernorm: bool = flag(False, "apply weight decay to query and key norms too")
    decoupled_weight_decay: bool = flag(
        True,
        "add the weight decay to the gradient (Adam with L2 instead of AdamW)",
        negated=True,
        off=("--no-weight-decay-decoupling", "--no-decoupled-weight-decay"),
    )
    adam_beta1: float = flag(0.9, "decay of Adam's first moment", at_least=0, below=1)
    adam_beta2: float = flag(0.999, "decay of Adam's second moment", at_least=0, below=1)
    adam_eps: float = flag(1e-8, "constant added to Adam's denominator", above=0)
    sgd_momentum: float = flag(0.9, "SGD: momentum", at_least=0, below=1)
    muon_momentum: float = flag(0.95, "Muon: momentum", at_least=0, below=1)
    muon_split_qkv: bool = flag(
        True, "Muon: treat queries, keys and values as one matrix", negated=True, off=("--muon-no-split-qkv",)
    )
    muon_use_nesterov: bool = flag(False, "Muon: Nesterov momentum")
    muon_scale_mode: str = flag(
        "spectral",
        "Muon: scale of the update of a matrix [m, n]: sqrt(max(m, n)), sqrt(m / n) or sqrt(max(1, m / n))",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_fp32_matmul_prec: str = flag(
        "medium",
        "Muon: precision of its products: bf16, TF32 (on GPUs) or fp32",
        choices=("low", "medium", "high", "highest"),
        not_served="torch has no such precision, and Megatron-LM fails with it; use medium",
        served=("medium", "high", "highest"),
    )
    muon_num_ns_steps: int = flag(5, "Muon: Newton-Schulz steps (a multiple of 5)", at_least=5)
    muon_tp_mode: str = flag(
        "blockwise",
        "Muon: matrices sharded over tensor parallel GPUs: each shard as a matrix of its own, or the whole matrix,"
        " gathered on each GPU or multiplied where it lies",
        choices=("blockwise", "duplicated", "distributed"),
    )
    muon_extra_scale_factor: float = flag(1.0, "Muon: additional factor of the update", above=0)
    clip_grad: float = flag(1.0, "maximum norm of the whole gradient (0: no clipping)", at_least=0)
    log_num_zeros_in_grad: bool = flag(
        False, "log the number of zeros in the gradient", not_served="it is not logged; leave it out"
    )
    check_for_nan_in_loss_and_grad: bool = flag(
        True,
        "skip an optimizer step whose loss or gradient is not finite, instead of ending the run",
        negated=True,
        off=("--no-check-for-nan-in-loss-and-grad",),
    )
    max_skipped_steps: int = flag(10, "consecutive skipped steps after which the run ends (count)", at_least=1)
    use_precision_aware_optimizer: bool = flag(
        False, "Transformer Engine's Adam, which can keep its state in fewer bits"
    )
    store_param_remainders: bool = flag(
        True,
        "keep full fp32 copies of bf16 weights instead of only the missing bits",
        negated=True,
        off=("--no-store-param-remainders",),
    )
    main_grads_dtype: str = flag(
        "fp32", "dtype of gradients in the precision-aware optimizer", choices=("fp32", "bf16")
    )
    main_params_dtype: str = flag("fp32", "dtype of its master weights", choices=("fp32", "fp16"))
    exp_avg_dtype: str = flag("fp32", "dtype of its first moment", choices=("fp32", "fp16", "bf16", "fp8"))
    exp_avg_sq_dtype: str = flag("fp32", "dtype of its second moment", choices=("fp32", "fp16", "bf16", "fp8"))
    use_stateless_adam: bool = flag(
        False, "Adam without moments", not_served="Adam always keeps its moments; leave it out"
    )
    reset_optimizer_states: bool = flag(
        False, "reset Adam's moments before each rollout", not_served="Adam always keeps its moments; leave it out"
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "load the schedule from the checkpoint",
        spellings=("--use-checkpoint-opt_param-scheduler",),
        not_served="flags set the schedule, and the checkpoint its step; use the flags of the earlier run",
    )
    override_opt_param_scheduler: bool = flag(
        False, "take the schedule from the flags (always on)", spellings=("--override-opt_param-scheduler",)
    )
    seed: int = flag(1234, "seed of weights, dropout and all other random numbers of training", at_least=0)


_LAYERS = "offloading whole layers is unsupported; use --recompute-granularity full or --optimizer-cpu-offload"
_FINE = "offloading single modules is unsupported; use --recompute-granularity selective with --recompute-modules"


@dataclasses.dataclass
class OffloadArguments:
    """Offloading to host memory."""

    optimizer_cpu_offload: bool = flag(False, "keep optimizer state in host memory and run the optimizer step there")
    optimizer_offload_fraction: float = flag(
        1.0, "fraction of the optimizer state that --optimizer-cpu-offload keeps there", at_least=0, at_most=1
    )
    use_torch_optimizer_for_cpu_offload: bool = flag(
        False,
        "torch's Adam on the device too",
        not_served="the state in host memory always uses torch's Adam, and megatron-core 0.16.1 ignores this flag for"
        " Adam; leave it out",
    )
    overlap_cpu_optimizer_d2h_h2d: bool = flag(
        False, "overlap copies of gradients and weights with the optimizer step on the host"
    )
    pin_cpu_grads: bool = flag(
        True, "do not pin the host's copy of gradients", negated=True, off=("--no-pin-cpu-grads",)
    )
    pin_cpu_params: bool = flag(
        True, "do not pin the host's copy of weights", negated=True, off=("--no-pin-cpu-params",)
    )
    cpu_offloading: bool = flag(False, "offload layers' activations to host memory", not_served=_LAYERS)
    cpu_offloading_num_layers: int = flag(0, "offloaded layers (count)", not_served=_LAYERS)
    cpu_offloading_activations: bool = flag(
        True, "do not offload activations", negated=True, off=("--no-cpu-offloading-activations",), not_served=_LAYERS
    )
    cpu_offloading_weights: bool = flag(False, "offload weights too", not_served=_LAYERS)
    cpu_offloading_double_buffering: bool = flag(False, "two buffers for offloaded layers", not_served=_LAYERS)
    fine_grained_activation_offloading: bool = flag(False, "offload activations of single modules", not_served=_FINE)
    offload_modules: list[str] = flag([], "modules to offload", nargs="*", not_served=_FINE)
    min_offloaded_tensor_size: int = flag(1024**2, "smallest offloaded tensor (elements)", not_served=_FINE)
