"""Discounted returns, generalised advantages, and rewards normalised within a prompt's group.

Returns are equation 3.9 of Sutton and Barto 2018, advantages those of Schulman et al. 2016 (GAE). Group-normalised
rewards are GRPO's (Shao et al. 2024, DeepSeekMath, section 4.1), or Dr. GRPO's (Liu et al. 2025) without the division
by the standard deviation.

Sums over at least `COMPILED_FROM` tokens in host memory are one loop that numba compiles; all others, and those on a
GPU, are matrix products over blocks of tokens. Both accumulate in float64.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor


def discounted_returns(rewards: Tensor, lengths: Tensor, gamma: float) -> Tensor:
    """`R_t = r_t + gamma * R_(t+1)` within each sample; Sutton & Barto 2018, equation 3.9.

    `rewards` [tokens] holds samples end to end; `lengths` [n] (integers) is the number of tokens of each. Returns
    float32 [tokens], accumulated in float64.

    Raises ValueError if the lengths do not add up to the number of rewards.
    """
    if int(lengths.sum()) != rewards.numel():
        raise ValueError(f"the lengths add up to {int(lengths.sum())} tokens and there are {rewards.numel()} rewards")
    if _is_compiled(rewards):
        ones = torch.ones_like(rewards)
        return _compiled_advantages(rewards, torch.zeros_like(rewards), ones, lengths, gamma=gamma, decay=gamma)[0]
    return _discounted_sums(rewards.double(), lengths.to(rewards.device), gamma).to(torch.float32)


_BLOCK = 16  # tokens: larger blocks cost more multiplications, smaller ones more levels


def _discounted_sums(terms: Tensor, lengths: Tensor, factor: float | Tensor) -> Tensor:
    """`S_t = x_t + factor * S_(t+1)` within each sample; float64 [tokens] from float64 [tokens].

    `factor` is one for all, or float64 [n], one for each sample. Blocks of each sample are summed at once. The sums
    from the starts of blocks are the same problem with a block as a token, and are added to the blocks before.
    """
    if terms.numel() == 0 or int(lengths.max()) == 1:
        return terms
    blocks = (lengths + _BLOCK - 1) // _BLOCK
    total = int(blocks.sum())
    shift = (blocks.cumsum(0) - blocks) * _BLOCK - (lengths.cumsum(0) - lengths)
    place = torch.arange(terms.numel(), device=terms.device)
    place += torch.repeat_interleave(shift, lengths, output_size=terms.numel())
    padded = terms.new_zeros(total * _BLOCK).index_copy_(0, place, terms).view(total, _BLOCK)
    of_blocks = factor
    if isinstance(factor, Tensor):
        of_blocks = torch.repeat_interleave(factor, blocks, output_size=total)[:, None]
    sums = _sums_within_blocks(padded, of_blocks)
    if int(blocks.max()) > 1:
        from_start = _discounted_sums(sums[:, 0].contiguous(), blocks, factor**_BLOCK)
        following = torch.cat([from_start[1:], from_start.new_zeros(1)])
        following[(blocks.cumsum(0) - 1)[blocks > 0]] = 0.0
        distance = _BLOCK - torch.arange(_BLOCK, device=terms.device).double()
        sums.addcmul_(following[:, None], of_blocks**distance)
    return sums.view(-1).index_select(0, place)


def _sums_within_blocks(terms: Tensor, factor: float | Tensor) -> Tensor:
    """The sums [blocks, _BLOCK] within rows; by a matrix product, or with a factor [blocks, 1] by doubling.

    Each doubling extends a sum over the next k terms by the sum over the k terms after them.
    """
    if not isinstance(factor, Tensor):
        position = torch.arange(_BLOCK, device=terms.device)
        distance = position[:, None] - position
        return terms @ torch.where(distance >= 0, factor ** distance.clamp(min=0).double(), 0.0)
    reach = 1
    while reach < _BLOCK:
        terms[:, :-reach] += factor**reach * terms[:, reach:]
        reach *= 2
    return terms


COMPILED_FROM = 1 << 16  # tokens: below, a call takes less than 4 ms in torch; the import of numba takes 0.2 s


def _is_compiled(column: Tensor) -> bool:
    return column.device.type == "cpu" and column.numel() >= COMPILED_FROM


def _scan(
    rewards: Any, values: Any, mask: Any, ends: Any, lengths: Any, decays: Any, first: int, last: int, gamma: float,
    advantages: Any, returns: Any,
) -> None:  # fmt: skip
    """Writes advantages and returns of the samples [first, last); `ends`: one past the last token of each.

    Arrays are float32 and int64, `decays` [n] float64. Two samples at a time go backwards, since each step of one waits
    for its previous step. Indices are unsigned: numba would test signed ones for counting from the end.
    """

    def step(at: Any, after: Any, following: Any, decay: Any) -> Any:
        trained = mask[at] != 0
        value = np.float64(values[at])
        found = np.float64(rewards[at]) + gamma * following - value + decay * after
        advantages[at] = np.float32(found) if trained else np.float32(0)
        returns[at] = np.float32(found + value) if trained else np.float32(0)
        return (found, value) if trained else (after, following)

    end_a, end_b, left_a, left_b = np.uint64(0), np.uint64(0), np.int64(0), np.int64(0)
    after_a, after_b, following_a, following_b, decay_a, decay_b = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    sample = first
    while True:
        while left_a == 0 and sample < last:
            end_a, left_a, after_a, following_a = np.uint64(ends[sample]), lengths[sample], 0.0, 0.0
            decay_a = decays[sample]
            sample += 1
        while left_b == 0 and sample < last:
            end_b, left_b, after_b, following_b = np.uint64(ends[sample]), lengths[sample], 0.0, 0.0
            decay_b = decays[sample]
            sample += 1
        steps = np.uint64(min(left_a, left_b))
        if steps == 0:
            break
        for back in range(np.uint64(1), steps + np.uint64(1)):
            after_a, following_a = step(end_a - back, after_a, following_a, decay_a)
            after_b, following_b = step(end_b - back, after_b, following_b, decay_b)
        end_a, end_b, left_a, left_b = end_a - steps, end_b - steps, left_a - steps, left_b - steps
    if left_b > 0:
        end_a, left_a, after_a, following_a, decay_a = end_b, left_b, after_b, following_b, decay_b
    for back in range(np.uint64(1), np.uint64(left_a + 1)):
        after_a, following_a = step(end_a - back, after_a, following_a, decay_a)


@functools.cache
def _compiled_scan() -> Callable[..., None]:
    """`_scan` as machine code. numba keeps it on disk, beside this file or else in the user's cache folder."""
    import numba

    column, whole = "float32[::1]", "int64[::1]"
    signature = (
        f"void({column}, {column}, {column}, {whole}, {whole}, float64[::1], int64, int64, float64, {column}, {column})"
    )
    try:
        compiled: Callable[..., None] = numba.njit(signature, nogil=True, cache=True)(_scan)
    except RuntimeError:  # neither folder can be written
        compiled = numba.njit(signature, nogil=True)(_scan)
    return compiled


@functools.cache
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """Kept, since to start and end threads takes 0.2 ms; `process` because a fork has none of its parent's threads."""
    return ThreadPoolExecutor(count)


def _compiled_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, lengths: Tensor, *, gamma: float, decay: float | Tensor
) -> tuple[Tensor, Tensor]:
    """`generalized_advantages` in host memory; samples are divided among torch's number of threads."""
    scan = _compiled_scan()
    columns = [column.detach().to(torch.float32).contiguous().numpy() for column in (rewards, values, mask)]
    counts = lengths.to("cpu", torch.int64).contiguous().numpy()
    ends = counts.cumsum()
    decays = torch.as_tensor(decay, dtype=torch.float64, device="cpu").expand(len(counts)).contiguous().numpy()
    both = torch.empty(2, rewards.numel(), dtype=torch.float32)
    threads = max(1, min(torch.get_num_threads(), len(counts)))
    cuts = np.searchsorted(ends, [len(columns[0]) * part // threads for part in range(1, threads)]).tolist()

    def scan_part(first: int, last: int) -> None:
        scan(*columns, ends, counts, decays, first, last, gamma, both[0].numpy(), both[1].numpy())

    if threads == 1:
        scan_part(0, len(counts))
    else:
        others = _threads(os.getpid(), threads - 1).map(scan_part, cuts, [*cuts[1:], len(counts)])
        scan_part(0, cuts[0])
        list(others)
    return both[0], both[1]


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """`1 - 1 / (alpha * l)` of a response of l tokens; Yue et al. 2025 (VAPO, arXiv:2504.05118), section 4.2.

    `lengths` [n]; returns float64 [n]. 0 for responses of at most `1 / alpha` tokens, where the formula is negative.
    """
    return (1 - 1 / (alpha * lengths.double())).clamp(min=0)


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, lengths: Tensor, *, gamma: float, lambd: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of the trained tokens; Schulman et al. 2016 (GAE), equations 11, 12 and 16.

    `delta_t = r_t + gamma * V_(t+1) - V_t` and `A_t = delta_t + gamma * lambd * A_(t+1)` within each sample, where the
    value after the last token is 0; the returns, the targets of the values, are `A_t + V_t`. A token with mask 0, such
    as a tool's answer, is no action: it takes part in no sum, its two results are 0, and the trained token before it is
    followed by the next trained token. Its reward must be 0.

    `rewards`, `values` and `mask` [tokens] hold samples end to end; `lengths` [n] (integers) is the number of tokens of
    each. `lambd` is one for all samples, or float64 [n]. Returns float32 [tokens] each, accumulated in float64. Raises
    ValueError if the lengths do not add up.
    """
    if not rewards.numel() == values.numel() == mask.numel() == int(lengths.sum()):
        raise ValueError(
            f"{rewards.numel()} rewards, {values.numel()} values and {mask.numel()} mask entries came with lengths"
            f" that add up to {int(lengths.sum())}: give one each per token"
        )
    if _is_compiled(mask):
        return _compiled_advantages(rewards, values, mask, lengths, gamma=gamma, decay=gamma * lambd)
    lengths = lengths.to(mask.device)
    trained = (mask != 0).nonzero().squeeze(1)
    rows = torch.arange(lengths.numel(), device=mask.device)
    sample_of_token = torch.repeat_interleave(rows, lengths, output_size=mask.numel()).index_select(0, trained)
    actions = torch.bincount(sample_of_token, minlength=lengths.numel())
    chosen = values.index_select(0, trained).double()
    following = torch.cat([chosen[1:], chosen.new_zeros(1)])[: chosen.numel()]
    following[(actions.cumsum(0) - 1)[actions > 0]] = 0.0
    deltas = rewards.index_select(0, trained).double().add_(following, alpha=gamma).sub_(chosen)
    advantages = _discounted_sums(deltas, actions, gamma * lambd)
    both = torch.zeros(2, mask.numel(), dtype=torch.float32, device=mask.device)
    both[0].index_copy_(0, trained, advantages.float())
    both[1].index_copy_(0, trained, advantages.add_(chosen).float())
    return both[0], both[1]


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
