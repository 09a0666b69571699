"""Advantages from rewards, normalised within the group of samples that answer one prompt."""

from __future__ import annotations

import torch
from torch import Tensor


def group_normalized_rewards(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    center: bool = True,
    scale_by_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """GRPO's `A_i = (r_i - mean(group)) / (std(group) + eps)`; `rewards`, `group_ids` [n] -> float32 [n].

    Shao et al. 2024 (DeepSeekMath), section 4.1, with the unbiased standard deviation (n - 1).
    `scale_by_std=False` leaves the division out (Liu et al. 2025, Dr. GRPO); `center=False` the subtraction.
    Groups are formed by equal ids wherever the samples stand, and may differ in size.

    A group of one sample, or whose rewards are all equal, has no spread to divide by: centred it is
    exactly 0, uncentred it keeps its rewards. Raises ValueError where the shapes differ.
    """
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards have shape {list(rewards.shape)} and group ids {list(group_ids.shape)}: both must be [n]"
        )
    values = rewards.to(torch.float64)
    groups, group_of = torch.unique(group_ids, return_inverse=True)
    zeros = values.new_zeros(groups.numel())
    counts = zeros.index_add(0, group_of, torch.ones_like(values))
    mean = zeros.index_add(0, group_of, values) / counts
    deviation = values - mean[group_of]

    # The rounded mean of equal rewards need not equal them, so flat groups are told by their range.
    lowest = zeros.scatter_reduce(0, group_of, values, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, group_of, values, "amax", include_self=False)
    flat = (lowest == highest)[group_of]

    result = deviation.masked_fill(flat, 0.0) if center else values
    if scale_by_std:
        variance = zeros.index_add(0, group_of, deviation.square()) / (counts - 1).clamp(min=1)
        result = torch.where(flat, result, result / (variance.sqrt()[group_of] + eps))
    return result.to(torch.float32)
