"""Log-probability and entropy of tokens from logits that are split over ranks by vocabulary column.

One autograd function, two all-reduces forward (maximum; packed sums), none backward. The softmax is never stored:
backward recomputes it piece by piece from the logits, which are kept, not copied. The pieces' arithmetic lies in
`softmax_sums`, which `output_log_probs` shares.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.algorithms.softmax_sums import WORKING_SHARE, SoftmaxSums, logit_gradient, own_columns

_FP32 = 4
_BUFFERS = 2  # float32 matrices of one piece that are alive together, forward and backward


def vocab_parallel_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    temperature: float = 1.0,
    chunk_size: int = -1,
) -> tuple[Tensor, Tensor]:
    """Natural log-probability of `targets` and entropy of the distribution, in float32, both [tokens].

    Args:
        logits: [tokens, padded_vocab / ranks], any float dtype; this rank's columns, ranks in order. Not modified.
        targets: int64 [tokens], ids in [0, vocab_size). An id outside has log-probability -inf.
        vocab_size: the true size; columns from there on are padding, left out of the softmax, gradient exactly 0.
        group: the tensor-parallel process group; None or a group of one for whole logits.
        temperature: the logits are divided by it first.
        chunk_size: rows worked on at a time; bounds the extra memory to two float32 buffers of
            [chunk_size, columns] forward and backward. -1: as many as keep them below 1/16 of the logits' bytes.

    Raises ValueError on shapes, a vocabulary larger than the columns, or a temperature that is not positive.
    """
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"logits have shape {list(logits.shape)} and targets {list(targets.shape)}:"
            " they must be [tokens, vocab] and [tokens]"
        )
    check_settings(logits.shape[1], vocab_size, group, temperature, chunk_size)
    return _VocabParallelLogProbs.apply(logits, targets, vocab_size, group, temperature, chunk_size)


def check_settings(
    columns: int, vocab_size: int, group: dist.ProcessGroup | None, temperature: float, chunk_size: int
) -> None:
    """Raises ValueError on settings that make no sense for `columns` logits on each rank of `group`."""
    ranks = group.size() if group is not None else 1
    if not 0 < vocab_size <= columns * ranks:
        raise ValueError(f"vocab_size is {vocab_size} and the logits have {columns} x {ranks} columns")
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature} and must be positive: the logits are divided by it")
    if chunk_size == 0 or chunk_size < -1:
        raise ValueError(f"chunk_size is {chunk_size}: give a number of rows, or -1 for a size that keeps memory small")


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        temperature: float,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        first, columns = own_columns(logits.shape[1], vocab_size, group)
        real, own_targets = logits[:, :columns], targets - first
        sums = SoftmaxSums.empty(logits.shape[0], logits.device)
        for rows in _chunks(logits, chunk_size):
            sums.rows(rows).add(real[rows], own_targets[rows], temperature)
        log_probs, entropy, shift = sums.finish(group, temperature)

        ctx.save_for_backward(logits, own_targets, shift, entropy)
        ctx.columns, ctx.temperature, ctx.chunk_size = columns, temperature, chunk_size
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        log_prob_grad, entropy_grad = grads
        logits, own_targets, shift, entropy = ctx.saved_tensors
        result = torch.empty_like(logits)
        result[:, ctx.columns :] = 0
        for rows in _chunks(logits, ctx.chunk_size):
            result[rows, : ctx.columns] = logit_gradient(
                logits[rows, : ctx.columns],
                own_targets[rows],
                shift[rows],
                entropy[rows],
                None if log_prob_grad is None else log_prob_grad[rows],
                None if entropy_grad is None else entropy_grad[rows],
                ctx.temperature,
            )
        return result, None, None, None, None, None


def _chunks(logits: Tensor, chunk_size: int) -> Iterator[slice]:
    """Slices of at most `chunk_size` rows."""
    rows = logits.shape[0]
    step = max(int(rows * WORKING_SHARE * logits.element_size() / (_BUFFERS * _FP32)), 1)
    if chunk_size > 0:
        step = chunk_size
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
