"""Closed-form counts from model sizes: weights (whole model, active per token, per GPU) and FLOPs of a forward pass.

Weight counts are sums over the tensors listed here, those of megatron-core's GPTModel; a test compares the list with
the real model. Used by the memory estimate and by the comparison with checkpoint files.

FLOPs count matrix products, two operations per multiply-add, as in Narayanan et al. 2021 (arXiv:2104.04473), appendix:
projections at their real width (heads x head width, which may differ from the hidden size), the experts that a token is
routed to, causal attention (a token attends to itself and earlier tokens), and logits if they are computed. Norms,
rotary positions and softmax are not counted.
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
    weights = sum(_layer_weights(spec, moe) for moe in spec.moe_layers)
    attended = 2 * spec.num_attention_heads * _widths_of_a_pair(spec) * spec.num_layers
    return 2 * weights * tokens + attended * pairs + 2 * spec.hidden_size * spec.vocab_size * scored_tokens


def _widths_of_a_pair(spec: ModelSpec) -> int:
    """Numbers multiplied per head for a query and a key, and then for the value."""
    if spec.latent is not None:
        return spec.latent.qk_channels + spec.latent.v_head_dim
    return 2 * spec.kv_channels


def _layer_weights(spec: ModelSpec, moe: bool) -> int:
    """Weights in the matrix products of one token."""
    attention = _attention_matrices(spec) if spec.latent is None else _latent_attention_matrices(spec, spec.latent)
    if moe and spec.experts is not None:
        return attention + _active_expert_matrices(spec, spec.experts)
    return attention + _feed_forward_matrices(spec, spec.ffn_hidden_size)


def _attention_matrices(spec: ModelSpec) -> int:
    heads = 2 * (spec.num_attention_heads + spec.num_query_groups)  # queries and output, keys and values
    return spec.hidden_size * spec.kv_channels * heads


def _latent_attention_matrices(spec: ModelSpec, latent: LatentAttention) -> int:
    hidden, heads = spec.hidden_size, spec.num_attention_heads
    queries = heads * latent.qk_channels
    down_and_up = hidden * queries if latent.q_lora_rank is None else latent.q_lora_rank * (hidden + queries)
    keys = hidden * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
    values = latent.kv_lora_rank * heads * (latent.qk_head_dim + latent.v_head_dim)
    return down_and_up + keys + values + heads * latent.v_head_dim * hidden


def _feed_forward_matrices(spec: ModelSpec, width: int) -> int:
    return (spec.fc1_matrices + 1) * spec.hidden_size * width


def _active_expert_matrices(spec: ModelSpec, experts: Experts) -> int:
    shared = _feed_forward_matrices(spec, experts.shared_ffn_hidden_size) + spec.hidden_size * experts.shared_gate
    routed = experts.top_k * _feed_forward_matrices(spec, experts.ffn_hidden_size)
    return spec.hidden_size * experts.number + routed + shared
