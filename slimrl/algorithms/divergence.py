"""Divergences between the next-token distributions of a teacher and of the student that is trained.

`output_divergence` computes them over the whole vocabulary from the last hidden states and output weights of both
models. It never holds all logits of either: it multiplies by both weights in chunks of vocabulary columns, once for the
softmax sums, once for the divergence, and once more in backward. Tensor parallelism splits the columns.

With p the teacher's distribution, q the student's and m = beta p + (1 - beta) q: Agarwal et al. 2024, "On-Policy
Distillation of Language Models" (GKD), arXiv:2306.13649, equation 1; beta as in TRL's GKDTrainer.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.algorithms import log_probs as chunked
from slimrl.algorithms.log_probs import SoftmaxSums

# float32 matrices of one chunk that are alive at the same time, compared with `output_log_probs`
_MORE_BUFFERS = 3


@dataclasses.dataclass(frozen=True)
class Divergence:
    """A divergence; `kind` is forward_kl, reverse_kl or jsd, whose `beta` is above 0 and below 1.

    - forward_kl: KL(p || q) = sum p (log p - log q).
    - reverse_kl: KL(q || p) = sum q (log q - log p).
    - jsd: beta KL(p || m) + (1 - beta) KL(q || m).

    Raises ValueError for another kind or beta.
    """

    kind: str
    beta: float = 0.5

    def __post_init__(self) -> None:
        if self.kind not in ("forward_kl", "reverse_kl", "jsd") or not 0 < self.beta < 1:
            raise ValueError(f"there is no divergence {self.kind} with beta {self.beta}: see the docstring")

    def sums(self, student: Tensor, teacher: Tensor) -> Tensor:
        """The divergence, and the mean of its slope: float32 [2, rows], summed over the columns given.

        `student` and `teacher` are log-probabilities, float32 [rows, columns]. The slope is the second factor of
        `logit_gradient`'s first term.
        """
        slope, weight = self._slope(student, teacher), student.exp()
        mean = weight.mul_(slope).sum(dim=1)
        if self.kind == "reverse_kl":
            return torch.stack([mean, mean])
        other = self._mixed(student, teacher) if self.kind == "jsd" else student
        of_teacher = teacher.exp().mul_(teacher - other).sum(dim=1)
        if self.kind == "forward_kl":
            return torch.stack([of_teacher, mean])
        return torch.stack([self.beta * of_teacher + mean, mean])

    def logit_gradient(self, student: Tensor, teacher: Tensor, mean: Tensor) -> Tensor:
        """The gradient by the student's logits (divided by the temperature), float32 [rows, columns].

        It is q (slope - `mean`), mean [rows] that of all columns; for forward_kl it is q - p.
        """
        if self.kind == "forward_kl":
            return student.exp() - teacher.exp()
        return student.exp().mul_(self._slope(student, teacher).sub_(mean[:, None]))

    def _slope(self, student: Tensor, teacher: Tensor) -> Tensor:
        """The derivative by q, up to a constant; 0 for forward_kl, whose gradient needs none."""
        if self.kind == "forward_kl":
            return torch.zeros_like(student)
        if self.kind == "reverse_kl":
            return student - teacher
        return (student - self._mixed(student, teacher)).mul_(1 - self.beta)

    def _mixed(self, student: Tensor, teacher: Tensor) -> Tensor:
        """log m."""
        return torch.logaddexp(teacher + math.log(self.beta), student + math.log1p(-self.beta))


def output_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    targets: Tensor,
    divergence: Divergence,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    temperature: float = 1.0,
    chunk_size: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of `targets`, entropy, and divergence from the teacher; float32 [tokens] each.

    As `log_probs.output_log_probs`, with `teacher_hidden` [tokens, width of the teacher] and its `teacher_weight` with
    as many rows as `weight`; both get no gradient. Both models' logits are divided by the temperature. Raises
    ValueError for wrong shapes.
    """
    pairs = ((hidden, weight), (teacher_hidden, teacher_weight))
    if any(len(one) != len(targets) or one.shape[1:] != matrix.shape[1:] for one, matrix in pairs):
        shapes = [list(one.shape) for pair in pairs for one in pair]
        raise ValueError(f"hidden states and weights {shapes} do not fit {len(targets)} targets or each other")
    if len(weight) != len(teacher_weight):
        raise ValueError(f"the student has {len(weight)} logits and the teacher {len(teacher_weight)}")
    chunked.check_settings(weight.shape[0], vocab_size, group, temperature, chunk_size)
    result: tuple[Tensor, Tensor, Tensor] = _OutputDivergence.apply(  # type: ignore[no-untyped-call]
        hidden, weight, teacher_hidden, teacher_weight, targets, divergence, vocab_size, group, temperature, chunk_size
    )
    return result


class _OutputDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        targets: Tensor,
        divergence: Divergence,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        temperature: float,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        first, columns = chunked.own_columns(weight.shape[0], vocab_size, group)
        width = chunked.piece_columns(hidden.shape[0], weight.shape[0], weight.element_size(), chunk_size)
        width = max(width // _MORE_BUFFERS, chunked.ALIGNMENT)
        local_targets = targets - first
        models = ((hidden, weight), (teacher_hidden, teacher_weight))
        sums = [SoftmaxSums.empty(hidden.shape[0], hidden.device) for _ in models]
        for chunk in chunked.column_chunks(columns, width):
            for (states, matrix), own in zip(models, sums, strict=True):
                own.add(states @ matrix[chunk].t(), local_targets - chunk.start, temperature)
        log_probs, entropy, shift = sums[0].finish(group, temperature)
        _, _, teacher_shift = sums[1].finish(group, temperature)

        shifts = (shift, teacher_shift)
        found = torch.zeros(2, hidden.shape[0], device=hidden.device)
        for chunk in chunked.column_chunks(columns, width):
            found += divergence.sums(*_log_probs(models, shifts, chunk, temperature))
        value, mean = chunked.reduced(found, dist.ReduceOp.SUM, group)

        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, local_targets, *shifts, entropy, mean)
        ctx.columns, ctx.width, ctx.temperature, ctx.divergence = columns, width, temperature, divergence
        ctx.set_materialize_grads(False)
        return log_probs, entropy, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, teacher_hidden, teacher_weight, local_targets, *shifts, entropy, mean = ctx.saved_tensors
        log_prob_grad, entropy_grad, value_grad = grads
        models = ((hidden, weight), (teacher_hidden, teacher_weight))

        def gradient_of(logits: Tensor, chunk: slice) -> Tensor:
            targets = local_targets - chunk.start
            given = (log_prob_grad, entropy_grad, ctx.temperature)
            own = chunked.logit_gradient(logits, targets, shifts[0], entropy, *given)
            if value_grad is not None:
                both = _log_probs(models, tuple(shifts), chunk, ctx.temperature)
                own += ctx.divergence.logit_gradient(*both, mean).mul_((value_grad / ctx.temperature)[:, None])
            return own

        both = chunked.chunked_gradients(ctx.needs_input_grad[:2], hidden, weight, ctx.columns, ctx.width, gradient_of)
        return *both, *(None for _ in range(8))


def _log_probs(
    models: tuple[tuple[Tensor, Tensor], ...], shifts: tuple[Tensor, ...], chunk: slice, temperature: float
) -> tuple[Tensor, ...]:
    """Log-probabilities of the columns `chunk`, float32 [rows, columns] of each model."""
    return tuple(
        chunked.shifted(states @ matrix[chunk].t(), shift, temperature)
        for (states, matrix), shift in zip(models, shifts, strict=True)
    )
