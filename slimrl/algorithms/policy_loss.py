"""Per-token policy-gradient losses: PPO with an asymmetric clip and an optional dual clip, and CISPO."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

# exp(20) is far outside every clip range; larger arguments overflow, and inf * 0 makes the gradient NaN.
_MAX_LOG_RATIO = 20.0


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """Per-token results, each of the shape of the log-probabilities."""

    loss: Tensor  # to be minimised; differentiable in log_probs
    clipped: Tensor  # float, 1 where the clip is active (no gradient flows)
    ratio: Tensor  # policy / old policy, detached


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """`exp(log_probs - old_log_probs)`, differentiable in `log_probs` and bounded far outside every clip range."""
    return (log_probs - old_log_probs.detach()).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> PolicyLoss:
    """`-min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_high) A)` with `r = exp(log_probs - old_log_probs)`.

    Schulman et al. 2017 (PPO), equation 7; the separate upper bound is DAPO's clip-higher (Yu et al. 2025).
    With `eps_clip_c` (> 1) the loss of tokens with A < 0 is at most `-eps_clip_c * A` (dual clip, Ye et
    al. 2020, equation 5), so that a very large ratio cannot dominate. All tensors have the same shape;
    `old_log_probs` and `advantages` get no gradient.

    Raises ValueError if eps_clip_c is not above 1.
    """
    if eps_clip_c is not None and eps_clip_c <= 1.0:
        raise ValueError(f"--eps-clip-c is {eps_clip_c} and must be above 1: it bounds the ratio from above")
    advantages = advantages.detach()
    ratio = importance_ratio(log_probs, old_log_probs)
    unclipped_loss = -ratio * advantages
    clipped_loss = -ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high) * advantages
    loss = torch.maximum(unclipped_loss, clipped_loss)
    clipped = clipped_loss > unclipped_loss
    if eps_clip_c is not None:
        bound = -eps_clip_c * advantages
        over = (advantages < 0) & (loss > bound)
        loss = torch.where(over, bound, loss)
        clipped = clipped | over
    return PolicyLoss(loss=loss, clipped=clipped.detach().to(loss.dtype), ratio=ratio.detach())


def cispo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, eps_clip: float, eps_clip_high: float
) -> PolicyLoss:
    """`-sg(clip(r, 1 - eps_clip, 1 + eps_clip_high)) A log_probs` with `r` as in PPO and sg the stop-gradient.

    MiniMax-M1 (2025), equations 4 and 5. The clip bounds a token's weight and never removes its gradient; `clipped` is
    1 where the weight was bounded.
    """
    ratio = importance_ratio(log_probs, old_log_probs).detach()
    weight = ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high)
    loss = -weight * advantages.detach() * log_probs
    return PolicyLoss(loss=loss, clipped=(weight != ratio).to(loss.dtype), ratio=ratio)
