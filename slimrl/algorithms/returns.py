"""Discounted returns, and rewards normalised within a prompt's group.

Returns are equation 3.9 of Sutton and Barto 2018. Group-normalised rewards are GRPO's (Shao et al. 2024, DeepSeekMath,
section 4.1), or Dr. GRPO's (Liu et al. 2025) without the division by the standard deviation.
"""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_returns(rewards: Tensor, lengths: Tensor, gamma: float) -> Tensor:
    """`R_t = r_t + gamma * R_(t+1)` within each sample; Sutton & Barto 2018, equation 3.9.

    `rewards` [tokens] holds samples end to end; `lengths` [n] (integers) is the number of tokens of each. Returns
    float32 [tokens], accumulated in float64, in log2(longest sample) passes over a padded matrix [n, longest].

    Raises ValueError if the lengths do not add up to the number of rewards.
    """
    if int(lengths.sum()) != rewards.numel():
        raise ValueError(f"the lengths add up to {int(lengths.sum())} tokens and there are {rewards.numel()} rewards")
    if rewards.numel() == 0:
        return rewards.to(torch.float32)
    lengths = lengths.to(rewards.device)
    longest = int(lengths.max())
    inside = torch.arange(longest, device=rewards.device) < lengths.unsqueeze(1)
    values = rewards.new_zeros(inside.shape, dtype=torch.float64)
    values[inside] = rewards.to(torch.float64)
    # after the pass with step k, each value is the discounted sum over 2k tokens starting at its own
    step = 1
    while step < longest:
        values[:, :-step] += gamma**step * values[:, step:].clone()
        step *= 2
    return values[inside].to(torch.float32)


def reward_at_last_token(rewards: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Each sample's reward [n] at its last unmasked token, 0 elsewhere; float32 [tokens].

    `mask` [tokens] holds samples end to end; `lengths` [n]. The reward of a fully masked sample is dropped.
    """
    lengths = lengths.to(mask.device)
    rows = torch.arange(lengths.numel(), device=mask.device)
    sample_of_token = torch.repeat_interleave(rows, lengths, output_size=mask.numel())
    positions = torch.arange(mask.numel(), device=mask.device)
    last = torch.full_like(lengths, -1).scatter_reduce(
        0, sample_of_token, torch.where(mask != 0, positions, -1), "amax", include_self=True
    )
    placed = torch.zeros(mask.numel(), dtype=torch.float32, device=mask.device)
    trained = last >= 0
    placed[last[trained]] = rewards.to(placed)[trained]
    return placed


def group_normalized_rewards(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    center: bool = True,
    scale_by_std: bool = True,
    leave_one_out: bool = False,
    weights: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """GRPO's `A_i = (r_i - mean(group)) / (std(group) + eps)`; `rewards`, `group_ids` [n] -> float32 [n].

    Shao et al. 2024 (DeepSeekMath), section 4.1, with the unbiased standard deviation (n - 1).
    `scale_by_std=False` omits the division (Liu et al. 2025, Dr. GRPO); `center=False` omits the subtraction.
    `leave_one_out` subtracts the mean of the group's other samples, `A_i = n / (n - 1) * (r_i - mean(group))` for a
    group of n (RLOO: Ahmadian et al. 2024, equation 8).
    With `weights` [n] the mean is `sum(w_j r_j) / sum(w_j)`; response lengths give OPO's baseline, the one of least
    variance if every token has a gradient of the same norm (Hao et al. 2025, section 3.2). A group whose weights are
    all 0 has the plain mean. Not with `leave_one_out`.
    Samples with equal ids form a group; they need not be adjacent, and groups may differ in size.

    A group of one sample, or whose rewards are all equal, is not divided by its zero standard deviation: with `center`
    the result is exactly 0, without it the rewards. Raises ValueError if the shapes differ, or for weights with
    `leave_one_out`.
    """
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards have shape {list(rewards.shape)} and group ids {list(group_ids.shape)}: both must be [n]"
        )
    if weights is not None and leave_one_out:
        raise ValueError("a mean without the sample itself has no weights: give weights or leave_one_out")
    values = rewards.to(torch.float64)
    groups, group_of = torch.unique(group_ids, return_inverse=True)
    zeros = values.new_zeros(groups.numel())
    counts = zeros.index_add(0, group_of, torch.ones_like(values))
    mean = zeros.index_add(0, group_of, values) / counts
    if weights is not None:
        of_groups = zeros.index_add(0, group_of, weights.to(values))
        weighted = zeros.index_add(0, group_of, weights.to(values) * values)
        mean = torch.where(of_groups > 0, weighted / of_groups, mean)
    deviation = values - mean[group_of]

    # The rounded mean of equal rewards may differ from them, so the range identifies groups of equal rewards.
    lowest = zeros.scatter_reduce(0, group_of, values, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, group_of, values, "amax", include_self=False)
    flat = (lowest == highest)[group_of]

    if leave_one_out:
        deviation = deviation * (counts / (counts - 1).clamp(min=1))[group_of]
    result = deviation.masked_fill(flat, 0.0) if center else values
    if scale_by_std:
        variance = zeros.index_add(0, group_of, deviation.square()) / (counts - 1).clamp(min=1)
        result = torch.where(flat, result, result / (variance.sqrt()[group_of] + eps))
    return result.to(torch.float32)
