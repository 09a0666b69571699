"""Log-probability and entropy of tokens, from vocabulary-parallel logits or directly from hidden states.

`vocab_parallel_log_probs` takes logits that tensor parallelism splits by vocabulary column and works on chunks of rows.
It does two all-reduces in forward (the maximum; the packed sums) and none in backward. The softmax is never stored:
backward recomputes it chunk by chunk from the saved logits, which are not copied.
`output_log_probs` never holds all logits. It multiplies by the output weight in chunks of vocabulary columns, and again
in backward, so that each chunk of the weight's gradient is one matrix product over all tokens. The cost is a fourth
matrix product in addition to the three of a layer that keeps its logits. `SoftmaxSums` rescales the chunks' sums to a
common maximum (Milakov and Gimelshein, arXiv:1805.02867), extended by the sum that the entropy needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WORKING_SHARE = 1 / 16  # default size of one chunk's buffers, as a fraction of the logits' bytes

# A logit of -inf (a forbidden token) has probability 0, and 0 * -inf is NaN; with this bound the product is 0.
_LOWEST = -1e30


def own_columns(columns: int, vocab_size: int, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The vocabulary id of this rank's first column, and how many of its `columns` are not padding."""
    first = columns * (group.rank() if group is not None else 0)
    return first, min(max(vocab_size - first, 0), columns)


@dataclasses.dataclass(frozen=True)
class SoftmaxSums:
    """Running sums over the columns added so far, float32 [rows] each; y is (logit - maximum) / temperature.

    `add` updates them in place. `target` is the target's logit once its column was added, else 0.
    """

    maximum: Tensor
    exp_sum: Tensor  # sum of exp(y)
    weighted_sum: Tensor  # sum of exp(y) y
    target: Tensor
    found: Tensor  # 1 if the target's column was added, else 0

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> SoftmaxSums:
        """The sums over no columns."""
        zeros = torch.zeros(4, rows, device=device)
        return cls(torch.full((rows,), float("-inf"), device=device), *zeros)

    def rows(self, chosen: slice) -> SoftmaxSums:
        """A view of some rows; `add` on it updates this object."""
        return SoftmaxSums(*(getattr(self, field.name)[chosen] for field in dataclasses.fields(self)))

    def add(self, logits: Tensor, targets: Tensor, temperature: float) -> None:
        """Adds the columns `logits` [rows, columns], any float dtype; `targets` are relative to their first column."""
        if logits.numel() == 0:
            return
        maximum = logits.amax(dim=1).float()
        # In a row of only -inf, subtracting the maximum would give NaN.
        scaled = shifted(logits, maximum.masked_fill(maximum == float("-inf"), 0.0), temperature)
        index, in_range = places(targets[:, None], logits.shape[1])
        self.target.add_(logits.gather(1, index).float().where(in_range, 0.0).squeeze(1))
        self.found.add_(in_range.squeeze(1))
        exp = scaled.exp()
        exp_sum = exp.sum(dim=1)
        weighted_sum = exp.mul_(scaled).sum(dim=1)

        common = torch.maximum(self.maximum, maximum)
        old_scale, new_scale = _scale(self.maximum, common, temperature), _scale(maximum, common, temperature)
        self.weighted_sum.copy_(
            _rescaled(self.weighted_sum, self.exp_sum, old_scale) + _rescaled(weighted_sum, exp_sum, new_scale)
        )
        self.exp_sum.copy_(self.exp_sum * old_scale.exp() + exp_sum * new_scale.exp())
        self.maximum.copy_(common)

    def finish(self, group: dist.ProcessGroup | None, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability of the target, entropy, and the shift for which (logit - shift) / temperature = log p.

        Float32 [rows] each, over the columns of all ranks of `group`; does two all-reduces. A target without a column,
        or with a logit of -inf, has log-probability -inf.
        """
        maximum = reduced(self.maximum.clone(), dist.ReduceOp.MAX, group)
        scale = _scale(self.maximum, maximum, temperature)
        target = ((self.target - maximum) / temperature).clamp_(min=_LOWEST).where(self.found > 0, 0.0)
        sums = torch.stack(
            [self.exp_sum * scale.exp(), _rescaled(self.weighted_sum, self.exp_sum, scale), target, self.found]
        )
        exp_sum, weighted_sum, target, found = reduced(sums, dist.ReduceOp.SUM, group)
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
    """Gradient w.r.t. the columns `logits`, float32 of their shape, given those w.r.t. log-probability and entropy.

    `targets` are relative to the first column; `shift` and `entropy` come from `SoftmaxSums.finish`. With respect to
    the logit, d log_prob = onehot - p and d entropy = -p (log p + entropy), both divided by the temperature.
    """
    log_p = shifted(logits, shift, temperature)
    result = log_p.exp()
    # p (scale log p + offset), with scale and offset per row, needs the fewest passes over the matrices.
    offset = torch.zeros_like(shift) if log_prob_grad is None else log_prob_grad / -temperature
    if entropy_grad is None:
        result.mul_(offset[:, None])
    else:
        scale = entropy_grad / -temperature
        result.mul_(log_p.mul_(scale[:, None]).add_(torch.addcmul(offset, scale, entropy)[:, None]))
    if log_prob_grad is not None and result.numel():
        # scatter_, not scatter_add_: one target per row, and deterministic on every device.
        index, in_range = places(targets[:, None], logits.shape[1])
        result.scatter_(1, index, result.gather(1, index) - offset[:, None] * in_range)
    return result


def places(ids: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """`ids` clamped to valid columns, and which of them were in range; of the shape of `ids`."""
    return ids.clamp(0, columns - 1), (ids >= 0) & (ids < columns)


def shifted(logits: Tensor, shift: Tensor, temperature: float) -> Tensor:
    """`(logits - shift) / temperature` in a new float32 buffer, with -inf replaced by a finite bound."""
    buffer = torch.empty_like(logits, dtype=torch.float32)
    torch.sub(logits, shift[:, None], out=buffer)
    if temperature != 1:
        buffer.div_(temperature)
    return buffer.clamp_(min=_LOWEST)


def _scale(maximum: Tensor, common: Tensor, temperature: float) -> Tensor:
    """The change of y when `common` replaces `maximum`; finite even if no column was added yet."""
    return ((maximum - common) / temperature).masked_fill(maximum == float("-inf"), _LOWEST).clamp_(min=_LOWEST)


def _rescaled(weighted_sum: Tensor, exp_sum: Tensor, scale: Tensor) -> Tensor:
    return scale.exp() * (weighted_sum + scale * exp_sum)


def reduced(tensor: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Tensor:
    """`tensor`, reduced in place over the ranks of `group`."""
    if group is not None and group.size() > 1 and tensor.numel():
        dist.all_reduce(tensor, op=operation, group=group)
    return tensor


_FP32 = 4
_BUFFERS = 2  # float32 matrices of one chunk that are alive at the same time, forward and backward


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
        targets: int64 [tokens], ids in [0, vocab_size). An id out of range has log-probability -inf.
        vocab_size: the unpadded size; later columns are padding, excluded from the softmax, with gradient exactly 0.
        group: the tensor-parallel process group; None or a group of one if the logits are not split.
        temperature: the logits are divided by it first.
        chunk_size: rows per chunk; bounds the extra memory to two float32 buffers of [chunk_size, columns] in forward
            and backward. -1 picks the number that keeps them below 1/16 of the logits' bytes.

    Raises ValueError for wrong shapes, a vocabulary larger than the columns, or a temperature that is not positive.
    """
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"logits have shape {list(logits.shape)} and targets {list(targets.shape)}:"
            " they must be [tokens, vocab] and [tokens]"
        )
    check_settings(logits.shape[1], vocab_size, group, temperature, chunk_size)
    result: tuple[Tensor, Tensor] = _VocabParallelLogProbs.apply(  # type: ignore[no-untyped-call]
        logits, targets, vocab_size, group, temperature, chunk_size
    )
    return result


def check_settings(
    columns: int, vocab_size: int, group: dist.ProcessGroup | None, temperature: float, chunk_size: int
) -> None:
    """Raises ValueError for settings that are invalid for `columns` logits on each rank of `group`."""
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
        unpadded, local_targets = logits[:, :columns], targets - first
        sums = SoftmaxSums.empty(logits.shape[0], logits.device)
        for rows in _chunks(logits, chunk_size):
            sums.rows(rows).add(unpadded[rows], local_targets[rows], temperature)
        log_probs, entropy, shift = sums.finish(group, temperature)

        ctx.save_for_backward(logits, local_targets, shift, entropy)
        ctx.columns, ctx.temperature, ctx.chunk_size = columns, temperature, chunk_size
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        log_prob_grad, entropy_grad = grads
        logits, local_targets, shift, entropy = ctx.saved_tensors
        result = torch.empty_like(logits)
        result[:, ctx.columns :] = 0
        for rows in _chunks(logits, ctx.chunk_size):
            result[rows, : ctx.columns] = logit_gradient(
                logits[rows, : ctx.columns],
                local_targets[rows],
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


ALIGNMENT = 64  # columns; matrix products are slow with odd widths


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
    """`vocab_parallel_log_probs` of `hidden @ weight.T`, float32 [tokens] each, without storing the product.

    Args:
        hidden: [tokens, width], equal on all ranks of `group`. Its gradient is this rank's term of a sum over ranks.
        weight: [padded_vocab / ranks, width], of hidden's dtype; this rank's rows, ranks in order.
        targets: int64 [tokens], ids in [0, vocab_size). An id out of range has log-probability -inf.
        vocab_size: the unpadded size; later rows of `weight` are padding: not computed, with gradient exactly 0.
        group: the tensor-parallel process group; None or a group of one if the weight is not split.
        temperature: the logits are divided by it first.
        chunk_size: the logits of one chunk take at most the memory of the logits of this many tokens. -1 picks the
            size that keeps a chunk and its two float32 buffers below 1/16 of the memory of all logits.

    Raises ValueError for wrong shapes, a vocabulary larger than the weight, or a temperature that is not positive.
    """
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
        raise ValueError(
            f"hidden states have shape {list(hidden.shape)}, the weight {list(weight.shape)} and targets"
            f" {list(targets.shape)}: they must be [tokens, width], [vocab, width] and [tokens]"
        )
    check_settings(weight.shape[0], vocab_size, group, temperature, chunk_size)
    result: tuple[Tensor, Tensor] = _OutputLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, vocab_size, group, temperature, chunk_size
    )
    return result


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
        local_targets = targets - first
        sums = SoftmaxSums.empty(hidden.shape[0], hidden.device)
        for chunk in column_chunks(columns, width):
            sums.add(hidden @ weight[chunk].t(), local_targets - chunk.start, temperature)
        log_probs, entropy, shift = sums.finish(group, temperature)

        ctx.save_for_backward(hidden, weight, local_targets, shift, entropy)
        ctx.columns, ctx.width, ctx.temperature = columns, width, temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, local_targets, shift, entropy = ctx.saved_tensors
        log_prob_grad, entropy_grad = grads

        def gradient_of(logits: Tensor, chunk: slice) -> Tensor:
            targets = local_targets - chunk.start
            return logit_gradient(logits, targets, shift, entropy, log_prob_grad, entropy_grad, ctx.temperature)

        both = chunked_gradients(ctx.needs_input_grad[:2], hidden, weight, ctx.columns, ctx.width, gradient_of)
        return *both, None, None, None, None, None


def chunked_gradients(
    needed: Sequence[bool],
    hidden: Tensor,
    weight: Tensor,
    columns: int,
    width: int,
    gradient_of: Callable[[Tensor, slice], Tensor],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `hidden` and `weight`, where `needed`, from the gradients of their product's columns.

    `gradient_of` gets the logits of a chunk of at most `width` of the `columns`, and its place; it returns the gradient
    by these logits, float32. Weight rows after `columns` are padding, with gradient 0. The terms of the chunks are
    accumulated in float32.
    """
    hidden_grad = torch.zeros_like(hidden, dtype=torch.float32) if needed[0] else None
    weight_grad = torch.empty_like(weight) if needed[1] else None
    if weight_grad is not None:
        weight_grad[columns:] = 0
    for chunk in column_chunks(columns, width):
        part = weight[chunk]
        gradient = gradient_of(hidden @ part.t(), chunk).to(hidden.dtype)
        if hidden_grad is not None:
            _add_product(hidden_grad, gradient, part)
        if weight_grad is not None:
            torch.mm(gradient.t(), hidden, out=weight_grad[chunk])
        del gradient  # frees it before the next chunk's logits are computed
    return None if hidden_grad is None else hidden_grad.to(hidden.dtype), weight_grad


def piece_columns(tokens: int, columns: int, element: int, chunk_size: int) -> int:
    """How many of `columns` one chunk has; `element` is the bytes of one logit, `chunk_size` as above."""
    fraction = WORKING_SHARE * element / (element + _BUFFERS * _FP32)
    if chunk_size > 0:
        fraction = chunk_size / max(tokens, 1)
    return max(int(columns * fraction) // ALIGNMENT, 1) * ALIGNMENT


def column_chunks(columns: int, width: int) -> Iterator[slice]:
    """Slices of at most `width` of the columns."""
    for start in range(0, columns, width):
        yield slice(start, min(start + width, columns))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, for a float32 total."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
