"""Floating point operations of a forward pass, in closed form from the model flags.

Counts the matrix products (two operations per multiplication and addition): the projections as wide as they are (heads
times head width, which need not be the hidden size), of experts those that a token is sent to, attention over the
tokens that a token sees (itself and those before it), logits where they are needed. Norms, rotations and softmax are
left out. Called by the trainer for its speed; arithmetic as in Narayanan et al. 2021 (arXiv:2104.04473), appendix.
"""

from __future__ import annotations

from collections.abc import Sequence

from slimrl.arguments.plan.shape import Experts, LatentAttention, Shape

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
    attention = _attention(shape) if shape.latent is None else _latent_attention(shape, shape.latent)
    return attention + (_experts(shape, shape.experts) if moe else _feed_forward(shape, shape.ffn))


def _attention(shape: Shape) -> int:
    return shape.hidden * shape.head_width * 2 * (shape.heads + shape.groups)  # queries and output, keys and values


def _latent_attention(shape: Shape, latent: LatentAttention) -> int:
    queries = shape.heads * (latent.qk_width + latent.rotary_width)
    down_and_up = shape.hidden * queries if latent.q_rank is None else latent.q_rank * (shape.hidden + queries)
    keys = shape.hidden * (latent.kv_rank + latent.rotary_width)
    values = latent.kv_rank * shape.heads * (latent.qk_width + latent.v_width)
    return down_and_up + keys + values + shape.heads * latent.v_width * shape.hidden


def _feed_forward(shape: Shape, width: int) -> int:
    return (shape.fc1_rows + 1) * shape.hidden * width


def _experts(shape: Shape, experts: Experts) -> int:
    shared = _feed_forward(shape, experts.shared_width) + shape.hidden * experts.shared_gate
    return shape.hidden * experts.number + experts.top_k * _feed_forward(shape, experts.width) + shared
