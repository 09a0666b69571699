"""Log-probability and entropy of tokens straight from the hidden states: the logits are never there as a whole.

The output layer's matrix is gone through in pieces of vocabulary columns; the logits of a piece live only until its
sums are taken, and backward computes them again. Cutting by columns and not by rows has each piece of the weight's
gradient written once, by one matrix product over all tokens. Costs a fourth matrix product beside the three of a layer
whose logits are kept. Called by the training workers' output layer (`slimrl.megatron.output`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.algorithms.log_probs import check_settings
from slimrl.algorithms.softmax_sums import WORKING_SHARE, SoftmaxSums, logit_gradient, own_columns

_FP32 = 4
_BUFFERS = 2  # float32 matrices of one piece that are alive together, beside its logits
_ALIGNMENT = 64  # columns; matrix products are slow with odd widths


def output_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    temperature: float = 1.0,
    chunk_size: int = -1,
) -> tuple[Tensor, Tensor]:
    """What `vocab_parallel_log_probs` makes of `hidden @ weight.T`, float32 [tokens] each, without storing that.

    Args:
        hidden: [tokens, width], equal on all ranks of `group`. Its gradient is this rank's share of a sum over ranks.
        weight: [padded_vocab / ranks, width], of hidden's dtype; this rank's rows, ranks in order.
        targets: int64 [tokens], ids in [0, vocab_size). An id outside has log-probability -inf.
        vocab_size: the true size; rows of `weight` from there on are padding: not computed, gradient exactly 0.
        group: the tensor-parallel process group; None or a group of one for a whole weight.
        temperature: the logits are divided by it first.
        chunk_size: the memory of the logits of this many tokens bounds that of one piece's logits. -1: as many as keep
            a piece and its two float32 buffers below 1/16 of what all logits would take.

    Raises ValueError on shapes, a vocabulary larger than the weight, or a temperature that is not positive.
    """
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
        raise ValueError(
            f"hidden states have shape {list(hidden.shape)}, the weight {list(weight.shape)} and targets"
            f" {list(targets.shape)}: they must be [tokens, width], [vocab, width] and [tokens]"
        )
    check_settings(weight.shape[0], vocab_size, group, temperature, chunk_size)
    return _OutputLogProbs.apply(hidden, weight, targets, vocab_size, group, temperature, chunk_size)


class _OutputLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        temperature: float,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        first, columns = own_columns(weight.shape[0], vocab_size, group)
        width = piece_columns(hidden.shape[0], weight.shape[0], weight.element_size(), chunk_size)
        own_targets = targets - first
        sums = SoftmaxSums.empty(hidden.shape[0], hidden.device)
        for piece in _pieces(columns, width):
            sums.add(hidden @ weight[piece].t(), own_targets - piece.start, temperature)
        log_probs, entropy, shift = sums.finish(group, temperature)

        ctx.save_for_backward(hidden, weight, own_targets, shift, entropy)
        ctx.columns, ctx.width, ctx.temperature = columns, width, temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, own_targets, shift, entropy = ctx.saved_tensors
        by_hidden, by_weight, *_ = ctx.needs_input_grad
        # The shares of the pieces are added up in float32.
        hidden_grad = torch.zeros_like(hidden, dtype=torch.float32) if by_hidden else None
        weight_grad = torch.empty_like(weight) if by_weight else None
        if weight_grad is not None:
            weight_grad[ctx.columns :] = 0
        for piece in _pieces(ctx.columns, ctx.width):
            part = weight[piece]
            gradient = logit_gradient(
                hidden @ part.t(), own_targets - piece.start, shift, entropy, *grads, ctx.temperature
            ).to(hidden.dtype)
            if hidden_grad is not None:
                _add_product(hidden_grad, gradient, part)
            if weight_grad is not None:
                torch.mm(gradient.t(), hidden, out=weight_grad[piece])
            del gradient  # else it would be there beside the next piece
        hidden_grad = None if hidden_grad is None else hidden_grad.to(hidden.dtype)
        return hidden_grad, weight_grad, None, None, None, None, None


def piece_columns(tokens: int, columns: int, element: int, chunk_size: int) -> int:
    """How many of `columns` one piece has; `element` is the bytes of one logit, `chunk_size` as above."""
    share = WORKING_SHARE * element / (element + _BUFFERS * _FP32)
    if chunk_size > 0:
        share = chunk_size / max(tokens, 1)
    return max(int(columns * share) // _ALIGNMENT, 1) * _ALIGNMENT


def _pieces(columns: int, width: int) -> Iterator[slice]:
    for start in range(0, columns, width):
        yield slice(start, min(start + width, columns))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, for a float32 total."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
