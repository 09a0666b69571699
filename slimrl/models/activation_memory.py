"""Activation memory of a micro-batch: bytes kept per layer for the backward pass, and the peak on top of all layers.

The method is that of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198, section 4.1): add up the tensors that the backward pass of each operation reads. Their layer is
GPT's; here it is packed tokens, grouped queries or latent attention without stored scores (flash attention), gated
feed-forward, RMSNorm, no dropout, and experts with evenly distributed tokens. docs/dry-run.md has every term.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from slimrl.models.model_spec import ModelSpec

FP32 = 4
# Without --log-probs-chunk-size, a chunk of logits and its two float32 buffers stay below this fraction of all logits.
PIECE_SHARE, PIECE_ALIGNMENT = 1 / 16, 64


@dataclasses.dataclass(frozen=True)
class Setting:
    """The settings, besides the model, that the bytes depend on.

    `tokens` are those of one GPU in one micro-batch; `element` is the bytes of one activation; `sequence` is the number
    of GPUs that share norms and residuals (tensor parallel size with sequence parallelism, else 1).
    """

    tokens: int
    element: int
    tensor: int = 1
    sequence: int = 1
    expert_tensor: int = 1
    fused: bool = True  # kernels that do not keep the inputs and results of every elementwise operation
    granularity: str | None = None  # of recomputation: None, "selective" or "full"
    modules: tuple[str, ...] = ("core_attn",)
    method: str | None = None
    unit: int = 1  # layers per recomputed unit (uniform), or layers recomputed (block)


def layer_parts(spec: ModelSpec, setting: Setting, *, moe: bool) -> dict[str, int]:
    """Bytes that one layer keeps, by the module whose recomputation would drop them ("" is never dropped)."""
    hidden = spec.hidden_size * setting.element * setting.tokens // setting.sequence
    extra_norms = spec.norms_per_layer - 2  # of the outputs of attention and feed-forward: their inputs are kept
    parts = {"": (2 + extra_norms) * hidden, "layernorm": 2 * hidden}
    parts |= _latent_attention(spec, setting) if spec.latent else _attention(spec, setting)
    return parts | (_experts(spec, setting) if moe else {"mlp": _feed_forward(spec, setting, spec.ffn_hidden_size)})


def _attention(spec: ModelSpec, setting: Setting) -> dict[str, int]:
    """Queries, keys, values and the result; with a norm on queries and keys also its inputs."""
    queries, keys = spec.num_attention_heads * spec.kv_channels, spec.num_query_groups * spec.kv_channels
    elements = 2 * queries + 2 * keys + (queries + keys if spec.qk_layernorm else 0)
    return {
        "attention": elements * setting.element * setting.tokens // setting.tensor,
        "core_attn": _softmax_sums(spec, setting),
    }


def _latent_attention(spec: ModelSpec, setting: Setting) -> dict[str, int]:
    """The latent vectors before and after their norm, replicated on every GPU; then heads, sharded as usual."""
    latent = spec.latent
    assert latent is not None
    latents = 2 * latent.kv_lora_rank + latent.qk_pos_emb_head_dim + 2 * (latent.q_lora_rank or 0)
    up = spec.num_attention_heads * (2 * latent.qk_channels + latent.v_head_dim)
    result = spec.num_attention_heads * latent.v_head_dim
    per_token = setting.element * setting.tokens
    return {
        "attention": latents * per_token // setting.sequence + result * per_token // setting.tensor,
        "mla_up_proj": up * per_token // setting.tensor,
        "core_attn": _softmax_sums(spec, setting),
    }


def _softmax_sums(spec: ModelSpec, setting: Setting) -> int:
    """One float32 per token and head: flash attention recomputes everything else."""
    return spec.num_attention_heads * FP32 * setting.tokens // setting.tensor


def _feed_forward(spec: ModelSpec, setting: Setting, width: int) -> int:
    """Result of the first linear layer, input of the second; without fused kernels also silu's result."""
    widths = spec.fc1_matrices + 1 + (1 if spec.gated and not setting.fused else 0)
    return widths * width * setting.element * setting.tokens // setting.tensor


def _experts(spec: ModelSpec, setting: Setting) -> dict[str, int]:
    """Router scores in float32, tokens at their experts (`top_k` copies of each), the shared expert."""
    experts = spec.experts
    assert experts is not None
    own = setting.tokens // setting.sequence
    routed = own * experts.top_k * setting.expert_tensor
    activation = 1 if setting.fused else 3  # silu, product, product with the router's weight
    own_width = spec.fc1_matrices * experts.ffn_hidden_size // setting.expert_tensor
    first = (spec.hidden_size + own_width) * setting.element * routed
    return {
        "moe": 2 * FP32 * experts.number * own + first,
        "moe_act": activation * experts.ffn_hidden_size // setting.expert_tensor * setting.element * routed,
        "shared_experts": _feed_forward(spec, setting, experts.shared_ffn_hidden_size),
    }


def layer_bytes(spec: ModelSpec, setting: Setting, *, moe: bool) -> int:
    """Bytes that one layer keeps with the flags' selective recomputation, without full recomputation."""
    parts = layer_parts(spec, setting, moe=moe)
    dropped = set(setting.modules) if setting.granularity == "selective" else set()
    if "moe" in dropped:
        dropped |= {"moe_act", "shared_experts"}
    return sum(size for name, size in parts.items() if name not in dropped)


def layer_input_bytes(spec: ModelSpec, setting: Setting) -> int:
    """Bytes of a layer's input, which is all that full recomputation keeps."""
    return spec.hidden_size * setting.element * setting.tokens // setting.sequence


def saved_bytes(spec: ModelSpec, setting: Setting, layers: Sequence[int], *, last: bool) -> int:
    """Bytes that the layers of a stage keep for one micro-batch; the last stage also has the final norm."""
    kept = [layer_bytes(spec, setting, moe=spec.moe_layers[layer]) for layer in layers]
    final = 2 * layer_input_bytes(spec, setting) if last else 0
    if setting.granularity != "full":
        return sum(kept) + final
    if setting.method == "block":
        recomputed = min(setting.unit, len(kept))
        return recomputed * layer_input_bytes(spec, setting) + sum(kept[recomputed:]) + final
    return -(-len(kept) // setting.unit) * layer_input_bytes(spec, setting) + final


def working_bytes(spec: ModelSpec, setting: Setting, layers: Sequence[int]) -> int:
    """Bytes of the backward pass through the largest layer, in addition to what is kept.

    Its recomputed activations (with full recomputation those of the whole unit), and gradients of its widest ones.
    """
    if not layers:
        return 0
    moes = {spec.moe_layers[layer] for layer in layers}
    largest = max(sum(layer_parts(spec, setting, moe=moe).values()) for moe in moes)
    recomputed = 0
    if setting.granularity == "full":
        recomputed = largest * (min(setting.unit, len(layers)) if setting.method == "uniform" else 1)
    elif setting.granularity == "selective":
        recomputed = largest - min(layer_bytes(spec, setting, moe=moe) for moe in moes)
    return recomputed + max(_gradient_bytes(spec, setting, moe=moe) for moe in moes)


def _gradient_bytes(spec: ModelSpec, setting: Setting, *, moe: bool) -> int:
    """Gradients alive at the widest point: two of the hidden states, and those of the feed-forward block."""
    hidden = 2 * layer_input_bytes(spec, setting)
    if not moe:
        return hidden + _feed_forward(spec, setting, spec.ffn_hidden_size)
    parts = _experts(spec, setting)
    return hidden + parts["moe"] + parts["moe_act"]


def output_bytes(spec: ModelSpec, setting: Setting, chunk_size: int, *, keep_logits: bool) -> int:
    """Bytes of the output layer and the loss at their largest, in the backward pass.

    Every token counts as a response token. `chunk_size` is --log-probs-chunk-size. The gradient of the weight exists
    until it is added to the gradient buffer.
    """
    columns = spec.padded_vocab_size // setting.tensor
    weight_gradient = columns * spec.hidden_size * setting.element
    if keep_logits:  # all of them, those of the response tokens, their gradient, two float32 buffers of some rows
        share = PIECE_SHARE * setting.element / (2 * FP32)
        rows = min(chunk_size, setting.tokens) if chunk_size > 0 else max(int(setting.tokens * share), 1)
        return columns * (3 * setting.element * setting.tokens + 2 * FP32 * rows) + weight_gradient
    piece = min(piece_columns(setting.tokens, columns, setting.element, chunk_size), columns)
    # the rows, their gradient in float32, a sum
    hidden = spec.hidden_size * setting.tokens * (FP32 + 2 * setting.element)
    return piece * setting.tokens * (setting.element + 2 * FP32) + hidden + weight_gradient


def piece_columns(tokens: int, columns: int, element: int, chunk_size: int) -> int:
    """The width of a chunk of logits: the same number as in `slimrl.algorithms.log_probs` (tested)."""
    share = chunk_size / max(tokens, 1) if chunk_size > 0 else PIECE_SHARE * element / (element + 2 * FP32)
    return max(int(columns * share) // PIECE_ALIGNMENT, 1) * PIECE_ALIGNMENT
