"""Sizes of a model in closed form: weights, FLOPs of a forward pass, and activations of a micro-batch.

Weights (whole model, active per token, per GPU) are sums over the tensors listed here, those of megatron-core's
GPTModel; a test compares the list with the real model.

FLOPs count matrix products, two operations per multiply-add, as in Narayanan et al. 2021 (arXiv:2104.04473), appendix:
projections at their real width (heads x head width, which may differ from the hidden size), the experts that a token is
routed to, causal attention (a token attends to itself and earlier tokens), and logits if they are computed. Norms,
rotary positions and softmax are not counted.

Activations are the bytes kept per layer for the backward pass, and the peak on top of all layers, by the method of
Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1: add up the tensors that the backward pass of each operation
reads. Their layer is GPT's; here it is packed tokens, grouped queries or latent attention without stored scores (flash
attention), gated feed-forward, RMSNorm, no dropout, and experts with evenly distributed tokens. docs/dry-run.md has
every term.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from slimrl.models.model_spec import Experts, LatentAttention, ModelSpec

# Megatron's gradient buffer with a distributed optimizer: tensors start at multiples of 64 elements, and the whole is
# padded so that the data parallel GPUs get equal parts, each at a multiple of 128 elements or a divisor of it.
TENSOR_ALIGNMENT = 64
BUFFER_ALIGNMENT = 128


class ElementWise(int):
    """Elements of a weight that an optimizer of matrices leaves to Adam: embedding, output layer, norm or bias."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """Numbers of elements of weight tensors; experts are counted separately because they are sharded differently."""

    dense: tuple[int, ...] = ()
    expert: tuple[int, ...] = ()

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.dense + other.dense, self.expert + other.expert)

    @property
    def total(self) -> int:
        """Elements altogether."""
        return sum(self.dense) + sum(self.expert)

    @property
    def matrices(self) -> int:
        """Elements of weights that are matrices, without embedding and output layer."""
        return sum(size for size in self.dense + self.expert if not isinstance(size, ElementWise))


@dataclasses.dataclass(frozen=True)
class Split:
    """How tensors are sharded: tensor parallel size, expert tensor and expert parallel size."""

    tp: int = 1
    etp: int = 1
    ep: int = 1


WHOLE = Split()


def total_parameters(spec: ModelSpec) -> int:
    """Number of weights in the model's Hugging Face checkpoint: no padding, tied weights once."""
    return _whole(spec).total


def active_parameters(spec: ModelSpec) -> int:
    """Weights that one token uses: of the experts, those that it is routed to."""
    weights = _whole(spec)
    if spec.experts is None:
        return weights.total
    return sum(weights.dense) + sum(weights.expert) * spec.experts.top_k // spec.experts.number


def selection_biases(spec: ModelSpec) -> int:
    """Elements of expert biases in a checkpoint, which are not trained by gradients."""
    if spec.experts is None or not spec.experts.expert_bias:
        return 0
    return sum(spec.moe_layers) * spec.experts.number


def _whole(spec: ModelSpec) -> Weights:
    spec = dataclasses.replace(spec.unpadded(), mtp_layers=0)
    return stage_weights(spec, WHOLE, range(spec.num_layers), first=True, last=True)


def stage_weights(spec: ModelSpec, split: Split, layers: Sequence[int], *, first: bool, last: bool) -> Weights:
    """The tensors of one GPU of a pipeline stage with these layers; `first` and `last` say which ends it has."""
    matrix = (ElementWise(spec.padded_vocab_size // split.tp * spec.hidden_size),)
    weights = Weights(matrix) if first or (last and spec.mtp_layers) else Weights()
    if first:  # whole on every tensor parallel GPU
        weights += Weights(tuple(ElementWise(size) for _, size in spec.vision_weights))
    kinds = {moe: layer_weights(spec, split, moe=moe) for moe in {spec.moe_layers[layer] for layer in layers}}
    number = {moe: sum(spec.moe_layers[layer] is moe for layer in layers) for moe in kinds}
    for moe, one in kinds.items():
        weights += Weights(one.dense * number[moe], one.expert * number[moe])
    if last:
        for _ in range(spec.mtp_layers):
            weights += _mtp_weights(spec, split)
        weights += Weights((*_norm(spec, spec.hidden_size), *(matrix if _has_output_matrix(spec, first) else ())))
    return weights


def critic_weights(spec: ModelSpec, split: Split, layers: Sequence[int], *, first: bool, last: bool) -> Weights:
    """The same of a critic: a row of the hidden size in place of the output matrix."""
    plain = dataclasses.replace(spec, tied=True, mtp_layers=0)
    weights = stage_weights(plain, split, layers, first=first, last=last)
    if not last:
        return weights
    has_matrix = _has_output_matrix(plain, first)
    body = weights.dense[:-1] if has_matrix else weights.dense
    return Weights((*body, ElementWise(spec.hidden_size)), weights.expert)


def _has_output_matrix(spec: ModelSpec, first: bool) -> bool:
    """If tied, the last stage needs a copy of the embedding unless it has the embedding itself."""
    return not spec.tied or not (first or spec.mtp_layers)


def layer_weights(spec: ModelSpec, split: Split, *, moe: bool) -> Weights:
    """One transformer layer."""
    norms = _norm(spec, spec.hidden_size) * spec.norms_per_layer
    attention = _latent_attention(spec, spec.latent, split.tp) if spec.latent else _attention(spec, split.tp)
    if moe and spec.experts is not None:
        return Weights(norms + attention) + _experts(spec, spec.experts, split)
    return Weights(norms + attention + _feed_forward(spec, spec.ffn_hidden_size, split.tp))


def _norm(spec: ModelSpec, width: int) -> tuple[int, ...]:
    return (ElementWise(width),) * (2 if spec.norm_bias else 1)


def _attention(spec: ModelSpec, tp: int) -> tuple[int, ...]:
    queries, keys = spec.num_attention_heads * spec.kv_channels // tp, spec.num_query_groups * spec.kv_channels // tp
    tensors = [(queries + 2 * keys) * spec.hidden_size, queries * spec.hidden_size]
    if spec.qkv_bias:
        tensors.append(ElementWise(queries + 2 * keys))
    if spec.linear_bias:
        tensors.append(ElementWise(spec.hidden_size))
    if spec.qk_layernorm:
        tensors += 2 * _norm(spec, spec.kv_channels)
    return tuple(tensors)


def _latent_attention(spec: ModelSpec, latent: LatentAttention, tp: int) -> tuple[int, ...]:
    """The down-projections to the latent vectors are replicated on every GPU (DeepSeek-V2, arXiv:2405.04434)."""
    heads = spec.num_attention_heads // tp
    tensors = [
        spec.hidden_size * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim),
        *_norm(spec, latent.kv_lora_rank),
        latent.kv_lora_rank * heads * (latent.qk_head_dim + latent.v_head_dim),
        heads * latent.v_head_dim * spec.hidden_size,
    ]
    if latent.q_lora_rank is None:
        tensors.append(spec.hidden_size * heads * latent.qk_channels)
    else:
        tensors += [
            spec.hidden_size * latent.q_lora_rank,
            *_norm(spec, latent.q_lora_rank),
            latent.q_lora_rank * heads * latent.qk_channels,
        ]
    if spec.linear_bias:
        tensors.append(ElementWise(spec.hidden_size))
    return tuple(tensors)


def _feed_forward(spec: ModelSpec, width: int, tp: int) -> tuple[int, ...]:
    rows = spec.fc1_matrices * width // tp
    tensors = (rows * spec.hidden_size, spec.hidden_size * width // tp)
    return (*tensors, ElementWise(rows), ElementWise(spec.hidden_size)) if spec.linear_bias else tensors


def _experts(spec: ModelSpec, experts: Experts, split: Split) -> Weights:
    """Router and shared expert are on every GPU; routed experts are distributed over the expert parallel GPUs."""
    dense = [experts.number * spec.hidden_size]
    if spec.linear_bias:
        dense.append(ElementWise(experts.number))
    if experts.shared_ffn_hidden_size:
        dense += _feed_forward(spec, experts.shared_ffn_hidden_size, split.tp)
        if experts.shared_gate:
            dense.append(spec.hidden_size)
    own = experts.number // split.ep
    return Weights(tuple(dense), _feed_forward(spec, experts.ffn_hidden_size, split.etp) * own)


def _mtp_weights(spec: ModelSpec, split: Split) -> Weights:
    """A multi-token prediction layer: three norms, the projection of two hidden states, a transformer layer."""
    norms = 3 * _norm(spec, spec.hidden_size)
    projection = 2 * spec.hidden_size * spec.hidden_size // split.tp
    return Weights((*norms, projection)) + layer_weights(spec, split, moe=spec.moe_layers[-1])


def buffer_elements(tensors: tuple[int, ...], parts: int, *, distributed: bool) -> int:
    """Elements of Megatron's gradient buffer over these tensors; `parts` GPUs share a distributed optimizer."""
    if not distributed:
        return sum(tensors)
    aligned = sum(_multiple(size, TENSOR_ALIGNMENT) for size in tensors)
    return _multiple(aligned, math.lcm(parts, BUFFER_ALIGNMENT))


def _multiple(value: int, unit: int) -> int:
    return -(-value // unit) * unit


# a backward pass multiplies each matrix by its input's and by its output's gradient
FORWARD_AND_BACKWARD = 3


def forward_flops(spec: ModelSpec, lengths: Sequence[int], scored_tokens: int) -> int:
    """FLOPs of sequences of these lengths (prompt and response); `scored_tokens` of their tokens need logits."""
    tokens = sum(lengths)
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    weights = sum(_multiplied_weights(spec, moe) * spec.moe_layers.count(moe) for moe in set(spec.moe_layers))
    attended = 2 * spec.num_attention_heads * _widths_of_a_pair(spec) * spec.num_layers
    return 2 * weights * tokens + attended * pairs + 2 * spec.hidden_size * spec.vocab_size * scored_tokens


def _widths_of_a_pair(spec: ModelSpec) -> int:
    """Numbers multiplied per head for a query and a key, and then for the value."""
    return spec.latent.qk_channels + spec.latent.v_head_dim if spec.latent else 2 * spec.kv_channels


def _multiplied_weights(spec: ModelSpec, moe: bool) -> int:
    """Weights of a layer in the matrix products of one token: of the experts, those that it is routed to."""
    weights = layer_weights(spec, WHOLE, moe=moe)
    routed = Weights(expert=weights.expert).matrices
    active = routed * spec.experts.top_k // spec.experts.number if spec.experts else 0
    return Weights(weights.dense).matrices + active


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
    parts |= _kept_by_latent_attention(spec, setting) if spec.latent else _kept_by_attention(spec, setting)
    return parts | (
        _kept_by_experts(spec, setting) if moe else {"mlp": _kept_by_feed_forward(spec, setting, spec.ffn_hidden_size)}
    )


def _kept_by_attention(spec: ModelSpec, setting: Setting) -> dict[str, int]:
    """Queries, keys, values and the result; with a norm on queries and keys also its inputs."""
    queries, keys = spec.num_attention_heads * spec.kv_channels, spec.num_query_groups * spec.kv_channels
    elements = 2 * queries + 2 * keys + (queries + keys if spec.qk_layernorm else 0)
    return {
        "attention": elements * setting.element * setting.tokens // setting.tensor,
        "core_attn": _softmax_sums(spec, setting),
    }


def _kept_by_latent_attention(spec: ModelSpec, setting: Setting) -> dict[str, int]:
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


def _kept_by_feed_forward(spec: ModelSpec, setting: Setting, width: int) -> int:
    """Result of the first linear layer, input of the second; without fused kernels also silu's result."""
    widths = spec.fc1_matrices + 1 + (1 if spec.gated and not setting.fused else 0)
    return widths * width * setting.element * setting.tokens // setting.tensor


def _kept_by_experts(spec: ModelSpec, setting: Setting) -> dict[str, int]:
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
        "shared_experts": _kept_by_feed_forward(spec, setting, experts.shared_ffn_hidden_size),
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
        return hidden + _kept_by_feed_forward(spec, setting, spec.ffn_hidden_size)
    parts = _kept_by_experts(spec, setting)
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
