"""Softmax of rows whose columns are seen piece by piece: its sums forward, the gradient of a piece backward.

The sums of pieces are merged by rescaling them to a common maximum (Milakov and Gimelshein, "Online normalizer
calculation for softmax", arXiv:1805.02867), extended by the sum that the entropy needs. So neither the pieces of one
rank nor the ranks of a tensor-parallel group have to know the rows' maximum first. Used by `log_probs` (pieces are
rows) and `output_log_probs` (pieces are columns).
"""

from __future__ import annotations

import dataclasses

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
