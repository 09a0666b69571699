"""Log-probability and entropy of tokens, from vocabulary-parallel logits or straight from hidden states.

`vocab_parallel_log_probs` takes logits that tensor parallelism splits by vocabulary column, in pieces of rows. It does
two all-reduces in forward (the maximum; the packed sums) and none in backward. The softmax is never stored: backward
recomputes it piece by piece from the logits, which are kept, not copied.
`output_log_probs` never holds all logits. It multiplies by the output weight in pieces of vocabulary columns, again in
backward, so that each piece of the weight's gradient is one matrix product over all tokens. The cost is a fourth
matrix product beside the three of a layer that keeps its logits. `SoftmaxSums` rescales the pieces' sums to a common
maximum (Milakov and Gimelshein, arXiv:1805.02867), extended by the sum that the entropy needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WORKING_SHARE = 1 / 16  # of the logits' bytes: what the buffers of one piece may take where the user names no size

# A logit of -inf (a forbidden token) has probability 0, and 0 * -inf would be NaN: bounded, the product is 0.
_LOWEST = -1e30


def own_columns(columns: int, vocab_size: int, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The first of this rank's `columns`, and how many of them are no padding."""
    first = columns * (group.rank() if group is not None else 0)
    return first, min(max(vocab_size - first, 0), columns)


@dataclasses.dataclass(frozen=True)
class SoftmaxSums:
    """Of the columns seen so far, float32 [rows] each; y is (logit - maximum) / temperature.

    `add` changes them in place; `target` is the target's logit in the pieces that have it, else 0.
    """

    maximum: Tensor
    exp_sum: Tensor  # sum of exp(y)
    weighted_sum: Tensor  # sum of exp(y) y
    target: Tensor
    found: Tensor  # 1 where the target's column was seen, else 0

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> SoftmaxSums:
        """Before any column was seen."""
        zeros = torch.zeros(4, rows, device=device)
        return cls(torch.full((rows,), float("-inf"), device=device), *zeros)

    def rows(self, chosen: slice) -> SoftmaxSums:
        """A view of some rows: what is added to it is added here."""
        return SoftmaxSums(*(getattr(self, field.name)[chosen] for field in dataclasses.fields(self)))

    def add(self, logits: Tensor, targets: Tensor, temperature: float) -> None:
        """Adds the columns `logits` [rows, columns], any float dtype; `targets` count from their first column."""
        if logits.numel() == 0:
            return
        maximum = logits.amax(dim=1).float()
        # A row of nothing but -inf: subtracted from itself it would be NaN.
        shifted = _shifted(logits, maximum.masked_fill(maximum == float("-inf"), 0.0), temperature)
        index, here = _index(targets, logits.shape[1])
        self.target.add_(logits.gather(1, index).squeeze(1).float().where(here, 0.0))
        self.found.add_(here)
        exp = shifted.exp()
        exp_sum = exp.sum(dim=1)
        weighted_sum = exp.mul_(shifted).sum(dim=1)

        both = torch.maximum(self.maximum, maximum)
        mine, its = _scale(self.maximum, both, temperature), _scale(maximum, both, temperature)
        self.weighted_sum.copy_(
            _rescaled(self.weighted_sum, self.exp_sum, mine) + _rescaled(weighted_sum, exp_sum, its)
        )
        self.exp_sum.copy_(self.exp_sum * mine.exp() + exp_sum * its.exp())
        self.maximum.copy_(both)

    def finish(self, group: dist.ProcessGroup | None, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability of the target, entropy, and the shift with (logit - shift) / temperature = log p.

        Float32 [rows] each, over the columns of all ranks of `group`: two all-reduces. A target without a column, or
        with a logit of -inf, has log-probability -inf.
        """
        maximum = _reduced(self.maximum.clone(), dist.ReduceOp.MAX, group)
        scale = _scale(self.maximum, maximum, temperature)
        target = ((self.target - maximum) / temperature).clamp_(min=_LOWEST).where(self.found > 0, 0.0)
        sums = torch.stack(
            [self.exp_sum * scale.exp(), _rescaled(self.weighted_sum, self.exp_sum, scale), target, self.found]
        )
        exp_sum, weighted_sum, target, found = _reduced(sums, dist.ReduceOp.SUM, group)
        log_sum = exp_sum.log()
        impossible = (found == 0) | (target <= _LOWEST)
        log_probs = (target - log_sum).masked_fill(impossible, float("-inf"))
        return log_probs, log_sum - weighted_sum / exp_sum, maximum + temperature * log_sum


def logit_gradient(
    logits: Tensor,
    targets: Tensor,
    shift: Tensor,
    entropy: Tensor,
    log_prob_grad: Tensor | None,
    entropy_grad: Tensor | None,
    temperature: float,
) -> Tensor:
    """The gradient by the columns `logits`, float32 of their shape, from those by log-probability and entropy.

    `targets` count from the first column; `shift` and `entropy` are those of `SoftmaxSums.finish`. By the logit,
    d log_prob = onehot - p and d entropy = -p (log p + entropy), both divided by the temperature.
    """
    log_p = _shifted(logits, shift, temperature)
    result = log_p.exp()
    # p (scale log p + offset), both by row, so that the matrices are gone through as few times as can be.
    offset = torch.zeros_like(shift) if log_prob_grad is None else log_prob_grad / -temperature
    if entropy_grad is None:
        result.mul_(offset[:, None])
    else:
        scale = entropy_grad / -temperature
        result.mul_(log_p.mul_(scale[:, None]).add_(torch.addcmul(offset, scale, entropy)[:, None]))
    if log_prob_grad is not None and result.numel():
        # scatter_, not scatter_add_: one target per row, and deterministic on every device.
        index, here = _index(targets, logits.shape[1])
        result.scatter_(1, index, result.gather(1, index) - (offset * here)[:, None])
    return result


def _index(targets: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """`targets` as indices [rows, 1] that are always valid, and which of them are meant."""
    return targets.clamp(0, columns - 1)[:, None], (targets >= 0) & (targets < columns)


def _shifted(logits: Tensor, shift: Tensor, temperature: float) -> Tensor:
    """`(logits - shift) / temperature` in a new float32 buffer, -inf made finite."""
    buffer = torch.empty_like(logits, dtype=torch.float32)
    torch.sub(logits, shift[:, None], out=buffer)
    if temperature != 1:
        buffer.div_(temperature)
    return buffer.clamp_(min=_LOWEST)


def _scale(maximum: Tensor, common: Tensor, temperature: float) -> Tensor:
    """By what y changes when `common` takes the place of `maximum`; finite also where no column was seen."""
    return ((maximum - common) / temperature).masked_fill(maximum == float("-inf"), _LOWEST).clamp_(min=_LOWEST)


def _rescaled(weighted_sum: Tensor, exp_sum: Tensor, scale: Tensor) -> Tensor:
    return scale.exp() * (weighted_sum + scale * exp_sum)


def _reduced(tensor: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and group.size() > 1 and tensor.numel():
        dist.all_reduce(tensor, op=operation, group=group)
    return tensor


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
    made: tuple[Tensor, Tensor] = _VocabParallelLogProbs.apply(  # type: ignore[no-untyped-call]
        logits, targets, vocab_size, group, temperature, chunk_size
    )
    return made


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
    made: tuple[Tensor, Tensor] = _OutputLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, vocab_size, group, temperature, chunk_size
    )
    return made


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
        by_log_probs, by_entropy = grads
        by_hidden, by_weight, *_ = ctx.needs_input_grad
        # The shares of the pieces are added up in float32.
        hidden_grad = torch.zeros_like(hidden, dtype=torch.float32) if by_hidden else None
        weight_grad = torch.empty_like(weight) if by_weight else None
        if weight_grad is not None:
            weight_grad[ctx.columns :] = 0
        for piece in _pieces(ctx.columns, ctx.width):
            part = weight[piece]
            gradient = logit_gradient(
                hidden @ part.t(), own_targets - piece.start, shift, entropy, by_log_probs, by_entropy, ctx.temperature
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
