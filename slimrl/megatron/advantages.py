"""Advantages per response token of one rank's samples, from the rewards that came with them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.algorithms.kl import kl_estimate
from slimrl.algorithms.returns import discounted_returns, reward_at_the_end
from slimrl.arguments import Arguments
from slimrl.data.batch import RolloutBatch


def token_advantages(
    args: Arguments,
    batch: RolloutBatch,
    log_probs: Tensor,
    ref_log_probs: Tensor | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """`token_returns`; with --normalize-advantages whitened over the trained tokens of all data-parallel ranks.

    These are the ranks of `group`.
    """
    returns = token_returns(args, batch, log_probs, ref_log_probs)
    return whitened(returns, batch.loss_mask.to(returns.device), group) if args.normalize_advantages else returns


def token_returns(args: Arguments, batch: RolloutBatch, log_probs: Tensor, ref_log_probs: Tensor | None) -> Tensor:
    """Float32 [response tokens of the rank]; group normalisation of the rewards has been done before.

    - reinforce_plus_plus (Hu 2025, equations 3 and 4): the discounted return of the reward at the last trained token
      and of -kl_coef * KL_t at every trained token.
    - all others: the sample's reward - kl_coef * KL_t.
    """
    device = log_probs.device
    lengths, mask = batch.response_lengths.to(device), batch.loss_mask.to(device)
    penalty = torch.zeros_like(log_probs)
    if args.kl_coef != 0.0 and ref_log_probs is not None:
        penalty = args.kl_coef * kl_estimate(log_probs, ref_log_probs, args.kl_loss_type)
    if args.advantage_estimator == "reinforce_plus_plus":
        rewards = reward_at_the_end(batch.rewards.to(device), mask, lengths) - penalty.masked_fill(mask == 0, 0.0)
        return discounted_returns(rewards, lengths, args.gamma)
    return torch.repeat_interleave(batch.rewards.to(device), lengths) - penalty


def whitened(values: Tensor, mask: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(values - mean) / (std + 1e-8) with mean and unbiased std over the unmasked values of all ranks."""
    trained = mask != 0
    chosen = values[trained].double()
    moments = torch.stack([chosen.new_tensor(float(chosen.numel())), chosen.sum()])
    dist.all_reduce(moments, group=group)
    count, total = moments
    mean = total / count.clamp(min=1)
    squares = (chosen - mean).square().sum()
    dist.all_reduce(squares, group=group)
    deviation = (squares / (count - 1).clamp(min=1)).sqrt()
    return ((values.double() - mean) / (deviation + 1e-8)).to(values.dtype)
