"""Rules about kernels that only GPUs have: attention and activations of Transformer Engine, dispatch between experts.

Without Transformer Engine a flag of its layers has no effect, and training logs it. With it, megatron-core 0.16.1 or
Transformer Engine 2.11 would end every rank, some of them in the first forward pass. The rules follow their source.
"""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.derive import FLASH_ATTENTION, flash_attention_installed, transformer_engine_installed
from slimrl.arguments.flag import Problem
from slimrl.arguments.namespace import Arguments, Context

_BACKEND, _EXCHANGE = "--attention-backend", "--cp-comm-type"


def context_parallel_exchange_fits_the_attention(args: Arguments, context: Context) -> Iterator[Problem]:
    """The exchange of keys and values between context-parallel GPUs supports packed samples and the model."""
    exchanges, ranks = args.cp_comm_type or [], args.context_parallel_size
    if "a2a+p2p" in exchanges:
        yield Problem(
            _EXCHANGE,
            f"{_EXCHANGE} a2a+p2p needs two levels of context parallelism and only one is supported: use p2p or a2a.",
        )
    if ranks == 1 or {"context_parallel_size", "tensor_model_parallel_size"} & context.broken:
        return
    if "all_gather" in exchanges:
        yield Problem(
            _EXCHANGE,
            f"{_EXCHANGE} all_gather does not support packed samples in Transformer Engine: use p2p or a2a.",
        )
    if "a2a" not in exchanges:
        return
    if args.multi_latent_attention:
        yield Problem(
            _EXCHANGE,
            f"{_EXCHANGE} a2a needs queries and values of one width, which --multi-latent-attention does not have:"
            " use p2p.",
        )
        return
    tp = args.tensor_model_parallel_size
    for flag, heads in (
        ("--num-attention-heads", args.num_attention_heads),
        ("--num-query-groups", args.num_query_groups),
    ):
        if heads and heads % tp == 0 and heads // tp % ranks:
            yield Problem(
                _EXCHANGE,
                f"{_EXCHANGE} a2a divides the heads of a GPU, and {flag} {heads} / --tensor-model-parallel-size {tp} ="
                f" {heads // tp} do not divide by --context-parallel-size {ranks}: use p2p.",
            )


def attention_backend_is_available(args: Arguments, context: Context) -> Iterator[Problem]:
    """Transformer Engine has the kernel of --attention-backend."""
    if not uses_transformer_engine(args) or "attention_backend" in context.broken:
        return
    backend = args.attention_backend
    if backend == "local":
        yield Problem(
            _BACKEND,
            f"{_BACKEND} local switches off every attention kernel of Transformer Engine: leave it out, or add"
            " --transformer-impl local.",
        )
    if backend == "unfused" and args.context_parallel_size > 1:
        yield Problem(
            _BACKEND,
            f"{_BACKEND} unfused does not support --context-parallel-size {args.context_parallel_size}: leave it out.",
        )
    latent = args.multi_latent_attention
    if backend == "flash" and not flash_attention_installed(latent=latent):
        model = " for --multi-latent-attention" if latent else ""
        yield Problem(
            _BACKEND,
            f"{_BACKEND} flash needs a package that is not installed{model}:"
            f" install {' or '.join(FLASH_ATTENTION[latent])}, or leave the flag out, which takes cuDNN's kernel.",
        )


def activations_are_fused_once(args: Arguments, context: Context) -> Iterator[Problem]:
    """--use-te-activation-func replaces the kernel that adds the bias, which is on by default."""
    if not args.use_te_activation_func:
        return
    fused, off = (
        (args.bias_swiglu_fusion, "--no-bias-swiglu-fusion")
        if args.swiglu
        else (args.bias_gelu_fusion, "--no-bias-gelu-fusion")
    )
    if fused:
        yield Problem(
            "--use-te-activation-func",
            f"--use-te-activation-func excludes the kernel that adds the bias: add {off}, or leave"
            " --use-te-activation-func out.",
        )


_FLEX = "--moe-token-dispatcher-type flex"


def dispatcher_fits_the_experts(args: Arguments, context: Context) -> Iterator[Problem]:
    """--moe-token-dispatcher-type flex has GPUs to dispatch between, one backend, and no flags of other dispatchers."""
    if args.num_experts is None or args.moe_token_dispatcher_type != "flex":
        return
    if args.moe_enable_deepep and args.moe_flex_dispatcher_backend != "deepep":
        yield Problem(
            "--moe-enable-deepep",
            f"--moe-enable-deepep and --moe-flex-dispatcher-backend {args.moe_flex_dispatcher_backend} exclude each"
            " other: give one.",
        )
    sizes = {"expert_model_parallel_size", "expert_tensor_parallel_size", "tensor_model_parallel_size"}
    if args.expert_model_parallel_size * (args.expert_tensor_parallel_size or 1) == 1 and not sizes & context.broken:
        yield Problem(
            "--moe-token-dispatcher-type",
            f"{_FLEX} dispatches tokens between GPUs, and each GPU has all experts: raise --expert-model-parallel-size,"
            " or use alltoall, without --moe-enable-deepep.",
        )
    if args.moe_shared_expert_overlap:
        yield Problem(
            "--moe-shared-expert-overlap",
            f"--moe-shared-expert-overlap does not support {_FLEX}: leave it out, or use alltoall, without"
            " --moe-enable-deepep.",
        )
    if args.moe_flex_dispatcher_backend != "deepep":
        return
    if args.moe_pad_expert_input_to_capacity:
        yield Problem(
            "--moe-pad-expert-input-to-capacity",
            f"--moe-pad-expert-input-to-capacity does not support {_FLEX} with DeepEP: leave it out, or use alltoall.",
        )
    if args.moe_deepep_num_sms % 2 and "moe_deepep_num_sms" not in context.broken:
        yield Problem(
            "--moe-deepep-num-sms",
            f"--moe-deepep-num-sms {args.moe_deepep_num_sms} is odd and DeepEP uses multiprocessors in pairs: give an"
            " even number.",
        )


def uses_transformer_engine(args: Arguments) -> bool:
    """Whether training on a GPU uses Transformer Engine's layers, if this environment is that of the ranks."""
    return args.transformer_impl != "local" and transformer_engine_installed()
