"""Replaces SGLang's products, norms, activations, rotary tables, attention, experts, and log-softmax of the sampler.

If the server's command line has `entry.BATCH_INVARIANT`, `install` is called by `cpu_patches` on a CPU, and
`install_on_gpu` by `entry` in each process that SGLang starts on a GPU, before it builds the model. Every operator is
that of the trainer (`slimrl.algorithms.batch_invariant`); additions, and products of two numbers, are torch's on both
sides.

On a GPU attention stays SGLang's (fa3, without splits of the keys), whose library the trainer calls, and so do the
experts, which a rule keeps out.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from slimrl.algorithms.batch_invariant import operators
from slimrl.engines.sglang.operators.cpu_attention import OPTIONS


def _replace_experts() -> None:
    """Replaces SGLang's choice of experts and their sums.

    As in megatron-core, an expert's weight multiplies the input of its second product, and the outputs of a token's
    experts are added in the order of the experts.
    """
    from sglang.srt.layers.moe import fused_moe_native, topk

    topk.fused_topk_native = choose_experts
    fused_moe_native.moe_forward_native = sum_experts


def choose_experts(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: torch.Tensor | None = None,
    scoring_func: str = "softmax",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fused_topk_native`: weights [tokens, topk] and experts; raises NotImplementedError for scores of other kinds."""
    if correction_bias is not None or scoring_func != "softmax":
        raise NotImplementedError(f"--true-on-policy-mode: a router with a bias, or with {scoring_func} scores")
    return operators.route(gating_output.float(), topk, over_all=not renormalize)


def sum_experts(layer: Any, x: torch.Tensor, topk_output: Any, moe_runner_config: Any) -> torch.Tensor:
    """`moe_forward_native`: the sums [tokens, hidden] of the experts' outputs.

    With two tensor parallel ranks, each of which has a half of every expert, the halves of an expert's output are added
    before the experts of a token are, as megatron-core does. The first rank returns the sum and the other zeros,
    because SGLang adds what its ranks return.
    """
    others = (moe_runner_config.gemm1_alpha, moe_runner_config.gemm1_clamp_limit)
    if moe_runner_config.activation != "silu" or any(value is not None for value in others):
        raise NotImplementedError("--true-on-policy-mode: experts with another activation than SwiGLU")
    from sglang.srt.distributed import moe_tensor_model_parallel_all_reduce

    weights, ids, _ = topk_output
    outputs, places = [], []
    for expert in range(layer.num_experts):
        tokens, column = (ids == expert).nonzero(as_tuple=True)
        if len(tokens):
            gate, up = operators.linear(x[tokens], layer.w13_weight[expert]).chunk(2, dim=-1)
            inner = operators.silu(gate) * up * weights[tokens, column, None]
            outputs.append(operators.linear(inner, layer.w2_weight[expert]))
            places.append(tokens)
    if not outputs:
        return torch.zeros_like(x)
    rows = torch.cat(outputs)
    if layer.moe_tp_size > 1:
        rows = moe_tensor_model_parallel_all_reduce(rows)
        if layer.moe_tp_rank > 0:
            return torch.zeros_like(x)
    return operators.sum_rows(rows, torch.cat(places), len(x))


def install() -> None:
    """Applies the replacements on a CPU to SGLang's classes and modules."""
    from sglang.srt.layers import sampler
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    _replace_layers("forward_cpu")
    TorchNativeAttnBackend._run_sdpa_forward_decode = attend_last
    TorchNativeAttnBackend._run_sdpa_forward_extend = attend_new
    sampler.torch = _with_own_softmax(torch)
    _replace_experts()


def install_on_gpu() -> None:
    """Applies the replacements on a GPU, for models without experts."""
    from sglang.srt.batch_invariant_ops import batch_invariant_ops
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    _replace_layers("forward_cuda")
    RotaryEmbedding.forward_cuda = rotated
    # SGLang's deterministic inference makes it torch's, also inside functions that it compiles
    batch_invariant_ops.log_softmax = log_softmax


def _replace_layers(forward: str) -> None:
    """Replaces the layers' functions `forward` and `forward_native`, and what the machine does not decide."""
    from sglang.srt.layers import activation, layernorm, logits_processor
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    UnquantizedLinearMethod.apply = product
    logits_processor.LogitsProcessor._compute_lm_head = head
    for name in (forward, "forward_native"):
        setattr(layernorm.RMSNorm, name, norm)
        setattr(activation.SiluAndMul, name, gated_silu)
    RotaryEmbedding._compute_cos_sin_cache = rotary_table
    RotaryEmbedding._ensure_cos_sin_cache_length = _extended(RotaryEmbedding._ensure_cos_sin_cache_length)


def product(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`UnquantizedLinearMethod.apply`."""
    output = operators.linear(x, layer.weight)
    return output if bias is None else output + bias


def head(self: Any, hidden: torch.Tensor, lm_head: Any, embedding_bias: torch.Tensor | None = None) -> torch.Tensor:
    """`LogitsProcessor._compute_lm_head`."""
    return operators.output_logits(hidden, lm_head.weight)


def log_softmax(logits: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """`batch_invariant_ops.log_softmax`; `logits` [..., columns] in float32."""
    return operators.log_softmax(logits.float().reshape(-1, logits.shape[-1]))[0].view(logits.shape)


def norm(
    self: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    """`RMSNorm.forward_native`: the norm, or with `residual` the norm of the sum and the sum."""
    if self.variance_size_override is not None:
        raise NotImplementedError("--true-on-policy-mode: this model normalises a part of its hidden states")
    for other in (residual, post_residual_addition):
        if other is not None:
            x = x + other
    output = operators.rms_norm(x, self.weight.data, self.variance_epsilon)
    return output if residual is None else (output, x)


def gated_silu(self: Any, x: torch.Tensor) -> torch.Tensor:
    """`SiluAndMul.forward_native`."""
    gate, up = x.chunk(2, dim=-1)
    return operators.silu(gate) * up


def rotary_table(self: Any) -> torch.Tensor:
    """`RotaryEmbedding._compute_cos_sin_cache`: [positions, rotary size], cosines before sines."""
    return _table(self, self.max_position_embeddings)


def _table(rotary: Any, positions: int) -> torch.Tensor:
    frequencies = rotary._compute_inv_freq(rotary.base)
    if torch.cuda.is_available():  # computed there, as megatron-core does
        even = torch.arange(0, rotary.rotary_dim, 2, dtype=torch.float32, device="cuda")
        frequencies = 1.0 / (rotary.base ** (even / rotary.rotary_dim))
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=frequencies.device), frequencies)
    return torch.cat(operators.cosines_and_sines(angles), dim=-1)


def rotated(
    self: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`RotaryEmbedding.forward_cuda`: queries and keys [tokens, heads * size] rotated by halves."""
    if not self.is_neox_style or offsets is not None or fused_set_kv_buffer_arg is not None:
        raise NotImplementedError(
            "--true-on-policy-mode: rotary positions that are interleaved, or fused with the cache"
        )
    rows = self.cos_sin_cache.index_select(0, positions.flatten())[:, None]
    cosines, sines = rows.chunk(2, dim=-1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        heads = x.reshape(len(rows), -1, self.head_size)
        return operators.rotate(heads, cosines, sines).view(x.shape)

    return turned(query), turned(key)


def _extended(own: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    """`_ensure_cos_sin_cache_length` with this module's rows for the positions that it adds."""

    def ensure(self: Any, needed: int) -> None:
        before = len(self.cos_sin_cache)
        own(self, needed)
        if len(self.cos_sin_cache) > before:
            self.cos_sin_cache = _table(self, len(self.cos_sin_cache))

    return ensure


def attend_last(
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """`_run_sdpa_forward_decode`: the last token of every request is its query."""
    _check(self, encoder_lens, options)
    tables = (req_to_token, req_pool_indices, seq_lens)
    return _attend(query, output, k_cache, v_cache, *tables, torch.ones_like(seq_lens), options)


def attend_new(
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """`_run_sdpa_forward_extend`: new tokens behind a prefix that is cached, or behind none."""
    _check(self, encoder_lens, options)
    tables = (req_to_token, req_pool_indices, seq_lens)
    return _attend(query, output, k_cache, v_cache, *tables, extend_seq_lens, options)


def _attend(
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    new: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    locations = torch.cat([req_to_token[row, :length] for row, length in zip(requests, lengths.tolist(), strict=True)])
    scaling = options.get("scaling")
    scale = query.shape[2] ** -0.5 if scaling is None else scaling
    ends = lengths.long().cumsum(0), new.long().cumsum(0)
    output.copy_(operators.attend_cached(query, k_cache, v_cache, locations.long(), *ends, scale))
    return output


def _check(backend: Any, encoder_lens: torch.Tensor | None, options: dict[str, Any]) -> None:
    """Raises NotImplementedError for attention that the trainer does not compute."""
    window, cross = options.get("sliding_window_size"), options.get("is_cross_attn") or encoder_lens is not None
    unknown = sorted(options.keys() - OPTIONS)
    if cross or unknown or backend.use_sliding_window_kv_pool or (window is not None and window > 0):
        raise NotImplementedError(f"--true-on-policy-mode: attention with a window or an encoder, or with {unknown}")


def _with_own_softmax(module: types.ModuleType) -> Any:
    """A copy of the torch module, for one module, whose softmax functions over rows are this package's."""

    def log_softmax(logits: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return operators.log_softmax(logits.float())[0]

    def softmax(logits: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return log_softmax(logits).exp()

    view: Any = types.ModuleType("torch")
    nn: Any = types.ModuleType("torch.nn")
    functional: Any = types.ModuleType("torch.nn.functional")
    for copy, original in ((view, module), (nn, module.nn), (functional, module.nn.functional)):
        copy.__getattr__ = original.__getattribute__
    functional.log_softmax = view.log_softmax = log_softmax
    view.softmax = softmax
    nn.functional, view.nn = functional, nn
    return view
