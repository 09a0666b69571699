"""slime's helpers around losses, by slimrl's formulas. Functions of training see whole responses in every layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slimrl.algorithms.kl import KLKind, kl_estimate
from slimrl.algorithms.off_policy import sequence_log_ratio
from slimrl.algorithms.policy_loss import clipped_policy_loss
from slimrl.algorithms.reduction import masked_mean_per_sample_sum, masked_sum
from slimrl.algorithms.returns import discounted_returns, reward_at_the_end


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int) -> Tensor:
    """`tensor` [response length], which is whole already. Raises ValueError where it is not."""
    return _whole(tensor, response_length)


def slice_log_prob_with_cp(
    log_prob: Any, total_length: int, response_length: int, qkv_format: str = "thd", max_token_len: int | None = None
) -> Any:
    """`log_prob` [response length], as it is. Raises ValueError where it has another length."""
    return _whole(log_prob, response_length)


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool = False,
    qkv_format: str = "thd",
    max_seq_lens: Sequence[int] | None = None,
) -> Callable[[Tensor], Tensor]:
    """From [tokens] to the sum over samples of the mean over their trained tokens, or over all trained tokens."""
    lengths, mask = torch.tensor(response_lengths), torch.cat(list(loss_masks)).float()

    def reduced(values: Tensor) -> Tensor:
        if calculate_per_token_loss:
            return masked_sum(values, mask.to(values.device))
        return masked_mean_per_sample_sum(values, mask.to(values.device), lengths)

    return reduced


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: KLKind, importance_ratio: Tensor | None = None
) -> Tensor:
    """The estimate of KL(policy || base) per token, times `importance_ratio` where it is given."""
    kl = kl_estimate(log_probs.float(), log_probs_base.float(), kl_loss_type)
    return kl if importance_ratio is None else importance_ratio * kl


def compute_policy_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None = None
) -> tuple[Tensor, Tensor]:
    """The clipped loss per token and 1.0 where a clip decided it, from `ppo_kl` = old - new log-probability."""
    loss = clipped_policy_loss(
        -ppo_kl,
        torch.zeros_like(ppo_kl),
        advantages,
        eps_clip=eps_clip,
        eps_clip_high=eps_clip_high,
        eps_clip_c=eps_clip_c,
    )
    return loss.loss, loss.clipped


def compute_gspo_kl(
    full_log_probs: Sequence[Tensor],
    full_old_log_probs: Sequence[Tensor],
    local_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> Tensor:
    """[tokens]: each sample's mean of old - new log-probability over its trained tokens, at each of its tokens."""
    lengths = torch.tensor([values.numel() for values in full_log_probs])
    mask = torch.cat(list(loss_masks)).float()
    return -sequence_log_ratio(torch.cat(list(full_log_probs)), torch.cat(list(full_old_log_probs)), mask, lengths)


def get_grpo_returns(rewards: Tensor, kl: Sequence[Tensor]) -> list[Tensor]:
    """Each sample's reward at each of its tokens; `kl` gives the shapes."""
    return [torch.full_like(one, float(reward)) for one, reward in zip(kl, rewards, strict=True)]


def get_reinforce_plus_plus_returns(
    rewards: Tensor,
    kl: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    response_lengths: Sequence[int],
    total_lengths: Sequence[int],
    kl_coef: float,
    gamma: float,
) -> list[Tensor]:
    """Discounted returns per token of the reward at the last trained token and of -kl_coef * kl at each."""
    lengths, mask = torch.tensor(response_lengths), torch.cat(list(loss_masks)).float()
    at_tokens = reward_at_the_end(torch.as_tensor(rewards).to(mask), mask, lengths) - kl_coef * torch.cat(list(kl))
    return list(discounted_returns(at_tokens, lengths, gamma).split(list(response_lengths)))


def get_reinforce_plus_plus_baseline_advantages(
    rewards: Tensor, kl: Sequence[Tensor], loss_masks: Sequence[Tensor], kl_coef: float
) -> list[Tensor]:
    """Each sample's reward, of which the group's mean is taken off already, less kl_coef * kl, at each token."""
    return [float(reward) - kl_coef * one for one, reward in zip(kl, rewards, strict=True)]


def _whole(values: Any, response_length: int) -> Any:
    if len(values) != response_length:
        raise ValueError(
            f"{len(values)} values came for a response of {response_length} tokens: functions of training see whole"
            " responses here, with context parallelism too"
        )
    return values
