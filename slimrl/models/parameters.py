"""Closed-form counts from model sizes: weights (whole model, active per token, per GPU) and FLOPs of a forward pass.

Weight counts are sums over the tensors listed here, which are those of megatron-core's GPTModel; a test compares the
list with the real model. The memory estimate and the comparison with checkpoint files use them.

FLOPs count matrix products, two operations per multiply-add, as in Narayanan et al. 2021 (arXiv:2104.04473), appendix:
projections at their true width (heads x head width, which may differ from the hidden size), the experts that a token is
sent to, causal attention (a token, itself and those before it), and logits where they are needed. Norms, rotary
positions and softmax are left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from slimrl.models.model_spec import Experts, LatentAttention, Shape

# Megatron's gradient buffer with a distributed optimizer: tensors start at multiples of 64 elements, and the whole is
# padded so that the data parallel GPUs get equal parts, each at a multiple of 128 elements or a divisor of it.
TENSOR_ALIGNMENT = 64
BUFFER_ALIGNMENT = 128


@dataclasses.dataclass(frozen=True)
class Weights:
    """Numbers of elements of some weight tensors: those of experts apart, for they are divided in another way."""

    dense: tuple[int, ...] = ()
    expert: tuple[int, ...] = ()

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.dense + other.dense, self.expert + other.expert)

    @property
    def total(self) -> int:
        """Elements altogether."""
        return sum(self.dense) + sum(self.expert)


@dataclasses.dataclass(frozen=True)
class Split:
    """How tensors are divided: by tensor parallel size, by expert tensor and expert parallel size."""

    tp: int = 1
    etp: int = 1
    ep: int = 1


WHOLE = Split()


def total_parameters(shape: Shape) -> int:
    """Weights of the model as its Hugging Face checkpoint has them: no padding, tied weights once."""
    return _whole(shape).total


def active_parameters(shape: Shape) -> int:
    """Weights that take part in the computation of one token: of the experts, the ones it is sent to."""
    weights = _whole(shape)
    if shape.experts is None:
        return weights.total
    return sum(weights.dense) + sum(weights.expert) * shape.experts.top_k // shape.experts.number


def selection_biases(shape: Shape) -> int:
    """Numbers in a checkpoint that steer the choice of experts and are not trained by gradients."""
    if shape.experts is None or not shape.experts.selection_bias:
        return 0
    return sum(shape.moe_layers) * shape.experts.number


def _whole(shape: Shape) -> Weights:
    shape = dataclasses.replace(shape.unpadded(), mtp_layers=0)
    return stage_weights(shape, WHOLE, range(shape.layers), first=True, last=True)


def stage_weights(shape: Shape, split: Split, layers: Sequence[int], *, first: bool, last: bool) -> Weights:
    """The tensors of one GPU of a pipeline stage with these layers; `first` and `last` say which ends it holds."""
    matrix = (shape.padded_vocab // split.tp * shape.hidden,)
    weights = Weights(matrix) if first or (last and shape.mtp_layers) else Weights()
    kinds = {moe: layer_weights(shape, split, moe=moe) for moe in {shape.moe_layers[layer] for layer in layers}}
    number = {moe: sum(shape.moe_layers[layer] is moe for layer in layers) for moe in kinds}
    for moe, one in kinds.items():
        weights += Weights(one.dense * number[moe], one.expert * number[moe])
    if last:
        for _ in range(shape.mtp_layers):
            weights += _mtp_weights(shape, split)
        weights += Weights((*_norm(shape, shape.hidden), *(matrix if _has_output_matrix(shape, first) else ())))
    return weights


def _has_output_matrix(shape: Shape, first: bool) -> bool:
    """Tied, the last stage needs a copy of the embedding unless it holds the embedding itself."""
    return not shape.tied or not (first or shape.mtp_layers)


def layer_weights(shape: Shape, split: Split, *, moe: bool) -> Weights:
    """One transformer layer."""
    norms = _norm(shape, shape.hidden) * shape.norms_per_layer
    attention = _latent_attention(shape, shape.latent, split.tp) if shape.latent else _attention(shape, split.tp)
    if moe and shape.experts is not None:
        return Weights(norms + attention) + _experts(shape, shape.experts, split)
    return Weights(norms + attention + _feed_forward(shape, shape.ffn, split.tp))


def _norm(shape: Shape, width: int) -> tuple[int, ...]:
    return (width, width) if shape.norm_bias else (width,)


def _attention(shape: Shape, tp: int) -> tuple[int, ...]:
    queries, keys = shape.heads * shape.head_width // tp, shape.groups * shape.head_width // tp
    tensors = [(queries + 2 * keys) * shape.hidden, queries * shape.hidden]
    if shape.qkv_bias:
        tensors.append(queries + 2 * keys)
    if shape.linear_bias:
        tensors.append(shape.hidden)
    if shape.qk_norm:
        tensors += 2 * _norm(shape, shape.head_width)
    return tuple(tensors)


def _latent_attention(shape: Shape, latent: LatentAttention, tp: int) -> tuple[int, ...]:
    """The projections down to the latent vectors are whole on every GPU (DeepSeek-V2, arXiv:2405.04434)."""
    heads, qk_width = shape.heads // tp, latent.qk_width + latent.rotary_width
    tensors = [
        shape.hidden * (latent.kv_rank + latent.rotary_width),
        *_norm(shape, latent.kv_rank),
        latent.kv_rank * heads * (latent.qk_width + latent.v_width),
        heads * latent.v_width * shape.hidden,
    ]
    if latent.q_rank is None:
        tensors.append(shape.hidden * heads * qk_width)
    else:
        tensors += [
            shape.hidden * latent.q_rank,
            *_norm(shape, latent.q_rank),
            latent.q_rank * heads * qk_width,
        ]
    if shape.linear_bias:
        tensors.append(shape.hidden)
    return tuple(tensors)


def _feed_forward(shape: Shape, width: int, tp: int) -> tuple[int, ...]:
    rows = shape.fc1_rows * width // tp
    tensors = (rows * shape.hidden, shape.hidden * width // tp)
    return (*tensors, rows, shape.hidden) if shape.linear_bias else tensors


def _experts(shape: Shape, experts: Experts, split: Split) -> Weights:
    """Router and shared expert on every GPU, the others spread over the expert parallel GPUs."""
    dense = [experts.number * shape.hidden]
    if shape.linear_bias:
        dense.append(experts.number)
    if experts.shared_width:
        dense += _feed_forward(shape, experts.shared_width, split.tp)
        if experts.shared_gate:
            dense.append(shape.hidden)
    own = experts.number // split.ep
    return Weights(tuple(dense), _feed_forward(shape, experts.width, split.etp) * own)


def _mtp_weights(shape: Shape, split: Split) -> Weights:
    """A layer of multi-token prediction: three norms, the projection of two hidden states, a transformer layer."""
    norms = 3 * _norm(shape, shape.hidden)
    projection = 2 * shape.hidden * shape.hidden // split.tp
    return Weights((*norms, projection)) + layer_weights(shape, split, moe=shape.moe_layers[-1])


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


def forward_flops(shape: Shape, lengths: Sequence[int], scored_tokens: int) -> int:
    """Of sequences of these lengths (prompt and response), `scored_tokens` of whose tokens need logits."""
    tokens = sum(lengths)
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    weights = sum(_layer_weights(shape, moe) for moe in shape.moe_layers)
    attended = 2 * shape.heads * _widths_of_a_pair(shape) * shape.layers
    return 2 * weights * tokens + attended * pairs + 2 * shape.hidden * shape.vocab * scored_tokens


def _widths_of_a_pair(shape: Shape) -> int:
    """Numbers multiplied per head for a query and a key, and then for the value."""
    if shape.latent is not None:
        return shape.latent.qk_width + shape.latent.rotary_width + shape.latent.v_width
    return 2 * shape.head_width


def _layer_weights(shape: Shape, moe: bool) -> int:
    """Weights that one token is multiplied by."""
    attention = _attention_matrices(shape) if shape.latent is None else _latent_attention_matrices(shape, shape.latent)
    if moe and shape.experts is not None:
        return attention + _active_expert_matrices(shape, shape.experts)
    return attention + _feed_forward_matrices(shape, shape.ffn)


def _attention_matrices(shape: Shape) -> int:
    return shape.hidden * shape.head_width * 2 * (shape.heads + shape.groups)  # queries and output, keys and values


def _latent_attention_matrices(shape: Shape, latent: LatentAttention) -> int:
    queries = shape.heads * (latent.qk_width + latent.rotary_width)
    down_and_up = shape.hidden * queries if latent.q_rank is None else latent.q_rank * (shape.hidden + queries)
    keys = shape.hidden * (latent.kv_rank + latent.rotary_width)
    values = latent.kv_rank * shape.heads * (latent.qk_width + latent.v_width)
    return down_and_up + keys + values + shape.heads * latent.v_width * shape.hidden


def _feed_forward_matrices(shape: Shape, width: int) -> int:
    return (shape.fc1_rows + 1) * shape.hidden * width


def _active_expert_matrices(shape: Shape, experts: Experts) -> int:
    shared = _feed_forward_matrices(shape, experts.shared_width) + shape.hidden * experts.shared_gate
    return shape.hidden * experts.number + experts.top_k * _feed_forward_matrices(shape, experts.width) + shared
