"""The loss of a critic's values."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, value_clip: float
) -> tuple[Tensor, Tensor]:
    """`max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2)` per token, and where it is clipped.

    The clip is that of PPO's reference implementation (Dhariwal et al. 2017, OpenAI Baselines; described by Engstrom et
    al. 2020, "Implementation Matters in Deep Policy Gradients", section 3): a value that moved further than
    `value_clip` from the one before the rollout gets no gradient, unless it moved away from its return. Without the
    factor 1/2, as in slime. All tensors [tokens]; differentiable in `values` only. The second result is float, 1 where
    `|V - V_old| > value_clip`.
    """
    old_values, returns = old_values.detach(), returns.detach()
    moved = values - old_values
    clipped = old_values + moved.clamp(-value_clip, value_clip)
    loss = torch.maximum((values - returns).square(), (clipped - returns).square())
    return loss, (moved.abs() > value_clip).to(loss.dtype)
