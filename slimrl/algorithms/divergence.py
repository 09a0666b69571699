"""Divergences between the next-token distributions of a teacher and of the student that is trained.

`output_divergence` computes them over the whole vocabulary from the last hidden states and output weights of both
models. It never holds all logits of either: it multiplies by both weights in chunks of vocabulary columns, once for the
softmax sums, once for the divergence, and once more in backward. Tensor parallelism splits the columns.

`output_top_divergence` needs only the teacher's most probable tokens: it compares the distributions over these and one
rest, which stands for all other tokens. That is a lower bound of the divergence over the vocabulary, and the same if
the models agree on the proportions within the rest.

With p the teacher's distribution, q the student's and m = beta p + (1 - beta) q: Agarwal et al. 2024, "On-Policy
Distillation of Language Models" (GKD), arXiv:2306.13649, equation 1; beta as in TRL's GKDTrainer.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

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

    def log_prob_gradient(self, student: Tensor, teacher: Tensor) -> Tensor:
        """The gradient by the log-probabilities `student`, each taken alone, of their shape."""
        if self.kind == "forward_kl":
            return -teacher.exp()
        return student.exp().mul_(self._slope(student, teacher))

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
    result: tuple[Tensor, Tensor, Tensor] = cast(Any, _OutputDivergence).apply(
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
                student = chunked.shifted(logits, shifts[0], ctx.temperature)
                (teacher,) = _log_probs(models[1:], tuple(shifts[1:]), chunk, ctx.temperature)
                own += ctx.divergence.logit_gradient(student, teacher, mean).mul_(
                    (value_grad / ctx.temperature)[:, None]
                )
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


def output_top_divergence(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    top_ids: Tensor,
    top_log_probs: Tensor,
    divergence: Divergence,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    temperature: float = 1.0,
    chunk_size: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of `targets`, entropy, and divergence from the teacher over its top tokens and a rest.

    As `log_probs.output_log_probs`; float32 [tokens] each. `top_ids` int64 [tokens, k] are the teacher's most probable
    tokens, without repetition, `top_log_probs` float [tokens, k] their log-probabilities. Raises ValueError for wrong
    shapes.
    """
    if top_ids.shape != top_log_probs.shape or len(top_ids) != len(targets):
        shapes = [list(one.shape) for one in (top_ids, top_log_probs)]
        raise ValueError(f"the teacher's top tokens have shapes {shapes} for {len(targets)} targets")
    chunked.check_settings(weight.shape[0], vocab_size, group, temperature, chunk_size)
    result: tuple[Tensor, Tensor, Tensor] = cast(Any, _OutputTopDivergence).apply(
        hidden, weight, targets, top_ids, top_log_probs, divergence, vocab_size, group, temperature, chunk_size
    )
    return result


# the least probability of the rest, below the rounding of the sum that it is computed from
_LEAST_REST = 1e-9


class _OutputTopDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        top_ids: Tensor,
        top_log_probs: Tensor,
        divergence: Divergence,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        temperature: float,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        first, columns = chunked.own_columns(weight.shape[0], vocab_size, group)
        width = chunked.piece_columns(hidden.shape[0], weight.shape[0], weight.element_size(), chunk_size)
        local_targets, local_top = targets - first, top_ids - first
        sums = SoftmaxSums.empty(hidden.shape[0], hidden.device)
        picked = torch.zeros(top_ids.shape, device=hidden.device)
        for chunk in chunked.column_chunks(columns, width):
            logits = hidden @ weight[chunk].t()
            sums.add(logits, local_targets - chunk.start, temperature)
            index, inside = chunked.places(local_top - chunk.start, logits.shape[1])
            picked += logits.gather(1, index).float().where(inside, 0.0)
        log_probs, entropy, shift = sums.finish(group, temperature)
        picked = chunked.reduced(picked, dist.ReduceOp.SUM, group)

        student = _with_rest((picked.double() - shift[:, None]) / temperature)
        teacher = _with_rest(top_log_probs.double())
        value, _ = divergence.sums(student, teacher)
        cells = divergence.log_prob_gradient(student, teacher)
        # by the logit of a token v: q_v (cells of the rest / q of the rest - sum of cells), and at a top token
        # in place of the first term that of its own cell
        of_rest = cells[:, -1] / student[:, -1].exp()
        everywhere = (of_rest - cells.sum(dim=1)).float()
        at_top = (cells[:, :-1] - student[:, :-1].exp() * of_rest[:, None]).float()

        ctx.save_for_backward(hidden, weight, local_targets, local_top, shift, entropy, everywhere, at_top)
        ctx.columns, ctx.width, ctx.temperature = columns, width, temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropy, value.float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, local_targets, local_top, shift, entropy, everywhere, at_top = ctx.saved_tensors
        log_prob_grad, entropy_grad, value_grad = grads

        def gradient_of(logits: Tensor, chunk: slice) -> Tensor:
            targets = local_targets - chunk.start
            given = (log_prob_grad, entropy_grad, ctx.temperature)
            own = chunked.logit_gradient(logits, targets, shift, entropy, *given)
            if value_grad is not None:
                scale = (value_grad / ctx.temperature)[:, None]
                own += chunked.shifted(logits, shift, ctx.temperature).exp_().mul_(everywhere[:, None] * scale)
                index, inside = chunked.places(local_top - chunk.start, logits.shape[1])
                own.scatter_add_(1, index, (at_top * scale).where(inside, 0.0))
            return own

        both = chunked.chunked_gradients(ctx.needs_input_grad[:2], hidden, weight, ctx.columns, ctx.width, gradient_of)
        return *both, *(None for _ in range(8))


def _with_rest(log_probs: Tensor) -> Tensor:
    """[rows, k] and the log-probability of all other tokens."""
    rest = (1 - log_probs.exp().sum(dim=1, keepdim=True)).clamp(min=_LEAST_REST).log()
    return torch.cat([log_probs, rest], dim=1)
