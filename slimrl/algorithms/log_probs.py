"""Log-probability and entropy of tokens from logits that are split over ranks by vocabulary column.

One autograd function, two all-reduces forward (maximum; packed sums), none backward. The softmax is
never stored: backward recomputes it chunk by chunk from the logits, which are kept, not copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# A logit of -inf (a forbidden token) has probability 0, and 0 * -inf would be NaN: bounded, the product is 0.
_LOWEST_SHIFTED_LOGIT = -1e30


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
        chunk_size: rows worked on at a time; bounds the extra float32 memory to two buffers of
            [chunk_size, columns] forward and backward. -1: all rows at once.

    Raises ValueError on shapes, a vocabulary larger than the columns, or a temperature that is not positive.
    """
    ranks = group.size() if group is not None else 1
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"logits have shape {list(logits.shape)} and targets {list(targets.shape)}:"
            " they must be [tokens, vocab] and [tokens]"
        )
    if not 0 < vocab_size <= logits.shape[1] * ranks:
        raise ValueError(f"vocab_size is {vocab_size} and the logits have {logits.shape[1]} x {ranks} columns")
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature} and must be positive: the logits are divided by it")
    if chunk_size == 0 or chunk_size < -1:
        raise ValueError(f"chunk_size is {chunk_size}: give a number of rows, or -1 for all")
    return _VocabParallelLogProbs.apply(logits, targets, vocab_size, group, temperature, chunk_size)


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
        first_column = logits.shape[1] * (group.rank() if group is not None else 0)
        columns = min(max(vocab_size - first_column, 0), logits.shape[1])  # this rank's without padding
        real = logits[:, :columns]
        local_targets = targets - first_column
        owned = (local_targets >= 0) & (local_targets < columns)
        local_targets = local_targets.clamp(0, max(columns - 1, 0))

        row_max = _row_max(real, temperature)
        _all_reduce(row_max, dist.ReduceOp.MAX, group)
        sums = _partial_sums(real, local_targets, owned, row_max, temperature, chunk_size)
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        exp_sum, weighted_sum, target_logit = sums
        log_normalizer = exp_sum.log()
        entropy = log_normalizer - weighted_sum / exp_sum
        log_probs = target_logit - log_normalizer
        impossible = (targets < 0) | (targets >= vocab_size) | (target_logit <= _LOWEST_SHIFTED_LOGIT)
        log_probs.masked_fill_(impossible, float("-inf"))

        ctx.save_for_backward(logits, local_targets, owned, row_max + log_normalizer, entropy)
        ctx.columns, ctx.temperature, ctx.chunk_size = columns, temperature, chunk_size
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """d log_prob = onehot - p and d entropy = -p (log p + entropy), by logit; both divided by the temperature."""
        log_prob_grad, entropy_grad = grads
        logits, local_targets, owned, log_total, entropy = ctx.saved_tensors
        real = logits[:, : ctx.columns]
        result = torch.empty_like(logits)
        result[:, ctx.columns :] = 0
        for rows in _chunks(logits.shape[0], ctx.chunk_size if ctx.columns else 0):
            log_p = _shifted(real[rows], log_total[rows], ctx.temperature)
            chunk = log_p.exp()
            if entropy_grad is not None:
                weight = log_p.add_(entropy[rows, None]).mul_(entropy_grad[rows, None])
                chunk.mul_(weight if log_prob_grad is None else weight.add_(log_prob_grad[rows, None]))
            elif log_prob_grad is not None:
                chunk.mul_(log_prob_grad[rows, None])
            chunk.neg_()
            if log_prob_grad is not None:
                # scatter_, not scatter_add_: one target per row, and deterministic on every device.
                index = local_targets[rows, None]
                chunk.scatter_(1, index, chunk.gather(1, index) + (log_prob_grad[rows] * owned[rows])[:, None])
            result[rows, : ctx.columns] = chunk.div_(ctx.temperature)
        return result, None, None, None, None, None


def _row_max(real: Tensor, temperature: float) -> Tensor:
    """Largest scaled logit of each row, float32 [tokens]; -inf where this rank holds only padding."""
    if real.shape[1] == 0:
        return real.new_full((real.shape[0],), float("-inf"), dtype=torch.float32)
    # Division by a positive number keeps the order, so the rows need not be scaled (and copied) first.
    return real.amax(dim=1).float().div_(temperature)


def _partial_sums(
    real: Tensor, local_targets: Tensor, owned: Tensor, row_max: Tensor, temperature: float, chunk_size: int
) -> Tensor:
    """This rank's share, float32 [3, tokens], of: sum exp(x), sum exp(x) x, x at the target; x shifted by row_max."""
    sums = row_max.new_zeros(3, row_max.numel())
    for rows in _chunks(real.shape[0], chunk_size if real.shape[1] else 0):
        shifted = _shifted(real[rows], row_max[rows], temperature)
        sums[2, rows] = shifted.gather(1, local_targets[rows, None]).squeeze(1).mul_(owned[rows])
        exp = shifted.exp()
        sums[0, rows] = exp.sum(dim=1)
        sums[1, rows] = exp.mul_(shifted).sum(dim=1)
    return sums


def _shifted(logits: Tensor, shift: Tensor, temperature: float) -> Tensor:
    """`logits / temperature - shift` in a new float32 buffer, -inf made finite."""
    buffer = logits.to(torch.float32, copy=True)
    return buffer.div_(temperature).sub_(shift[:, None]).clamp_(min=_LOWEST_SHIFTED_LOGIT)


def _chunks(rows: int, chunk_size: int) -> Iterator[slice]:
    """Slices of at most `chunk_size` rows (-1: all of them; 0: nothing to do)."""
    if rows == 0 or chunk_size == 0:
        return
    step = rows if chunk_size < 0 else chunk_size
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _all_reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=operation, group=group)
