"""Custom parts of the policy loss: an off-policy correction that rejects tokens, and a constant normalization.

--use-tis --tis-clip 2 --tis-clip-low 0.5 --custom-tis-function-path examples.policy_loss.reject
--custom-pg-loss-reducer-function-path examples.policy_loss.by_constant
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slimrl.arguments import Arguments

TOKENS_PER_SAMPLE = 1024  # maximum response length of the run


def reject(
    args: Arguments,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    **lengths: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Masks tokens whose ratio of training to engine probability is outside the two bounds.

    The other tokens have this ratio as their weight, and means are taken over them only.
    """
    ratio = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp()
    inside = (ratio >= args.tis_clip_low) & (ratio <= args.tis_clip)
    kept = torch.cat(loss_masks) * inside
    masks = list(kept.split([mask.numel() for mask in loss_masks]))
    # logged as means over the remaining tokens
    return pg_loss * ratio.masked_fill(~inside, 0.0), masks, {"kept_ratio": ratio}


def by_constant(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[Tensor], calculate_per_token_loss: bool
) -> Callable[[Tensor], Tensor]:
    """Gives every token the same weight, independent of its answer's length: sum / constant (Dr. GRPO)."""
    mask = torch.cat(loss_masks)
    return lambda values: (values * mask).sum() / TOKENS_PER_SAMPLE
