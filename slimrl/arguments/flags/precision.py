"""Flags of number formats below 32 bits: bf16, fp16 with loss scaling, fp8 and fp4."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag

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
        "delayed", "method for fp8 scales", choices=("tensorwise", "delayed", "mxfp8", "blockwise", "custom")
    )
    fp8_param_gather: bool = flag(False, "also keep the compute copy of weights in fp8")
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
    reuse_grad_buf_for_mxfp8_param_ag: bool = flag(False, "gather mxfp8 weights into the gradients' memory")
    fp4_format: str | None = flag(None, "compute matrix products in fp4 (no fp4)", choices=("e2m1",))
    fp4_recipe: str = flag("nvfp4", "method for fp4 scales", choices=("nvfp4", "custom"))
    fp4_param_gather: bool = flag(False, "also keep the compute copy of weights in fp4", spellings=("--fp4-param",))
    fp4_quantizer_factory: str | None = flag(None, "function that makes an fp4 quantizer", not_served=_FACTORY)
    use_kitchen: bool = flag(False, "NVIDIA's Kitchen quantisation library", not_served=_KITCHEN)
    use_kitchen_attention: bool = flag(False, "Kitchen's attention", not_served=_KITCHEN)
    kitchen_attention_backend: str = flag(
        "sdpa", "kernel of Kitchen's attention", choices=("sdpa", "fa"), not_served=_KITCHEN
    )
    quant_recipe: str | None = flag(
        None, "Kitchen: file of per-layer recipes", spellings=("--kitchen-config-file",), not_served=_KITCHEN
    )
