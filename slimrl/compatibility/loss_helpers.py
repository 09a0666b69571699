"""slime's loss helpers with slimrl's formulas, and its loss masks of multi-turn conversations.

Training hooks receive whole responses in every parallel layout, so that the context-parallel helpers return their
argument. The masks are those of SFT (`slimrl.rollout.sft_rollout`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slimrl.algorithms.losses import KLKind, clipped_policy_loss, kl_estimate, masked_mean_per_sample_sum, masked_sum
from slimrl.algorithms.off_policy import sequence_log_ratio
from slimrl.algorithms.returns import discounted_returns, reward_at_last_token
from slimrl.data.loss_mask import LOSS_MASK_TYPES, masked_conversation


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int) -> Tensor:
    """Returns `tensor` [response length] unchanged. Raises ValueError if it has another length."""
    return _whole(tensor, response_length)


def slice_log_prob_with_cp(
    log_prob: Any, total_length: int, response_length: int, qkv_format: str = "thd", max_token_len: int | None = None
) -> Any:
    """Returns `log_prob` [response length] unchanged. Raises ValueError if it has another length."""
    return _whole(log_prob, response_length)


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool = False,
    qkv_format: str = "thd",
    max_seq_lens: Sequence[int] | None = None,
) -> Callable[[Tensor], Tensor]:
    """A reducer of [tokens]: the sum over samples of the mean over trained tokens, or the sum over trained tokens."""
    lengths, mask = torch.tensor(response_lengths), torch.cat(list(loss_masks)).float()

    def reduced(values: Tensor) -> Tensor:
        if calculate_per_token_loss:
            return masked_sum(values, mask.to(values.device))
        return masked_mean_per_sample_sum(values, mask.to(values.device), lengths)

    return reduced


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: KLKind, importance_ratio: Tensor | None = None
) -> Tensor:
    """The estimate of KL(policy || base) per token, times `importance_ratio` if given."""
    kl = kl_estimate(log_probs.float(), log_probs_base.float(), kl_loss_type)
    return kl if importance_ratio is None else importance_ratio * kl


def compute_policy_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None = None
) -> tuple[Tensor, Tensor]:
    """The clipped loss per token and 1.0 for clipped tokens, from `ppo_kl` = old - new log-probability."""
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
    """[tokens]: each sample's mean of old - new log-probability over its trained tokens, repeated for its tokens."""
    lengths = torch.tensor([values.numel() for values in full_log_probs])
    mask = torch.cat(list(loss_masks)).float()
    return -sequence_log_ratio(torch.cat(list(full_log_probs)), torch.cat(list(full_old_log_probs)), mask, lengths)


def get_grpo_returns(rewards: Tensor, kl: Sequence[Tensor]) -> list[Tensor]:
    """Each sample's reward repeated for its tokens; `kl` gives the shapes."""
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
    """Discounted returns per token: the reward is at the last trained token, -kl_coef * kl at each token."""
    lengths, mask = torch.tensor(response_lengths), torch.cat(list(loss_masks)).float()
    at_tokens = reward_at_last_token(torch.as_tensor(rewards).to(mask), mask, lengths) - kl_coef * torch.cat(list(kl))
    return list(discounted_returns(at_tokens, lengths, gamma).split(list(response_lengths)))


def get_reinforce_plus_plus_baseline_advantages(
    rewards: Tensor, kl: Sequence[Tensor], loss_masks: Sequence[Tensor], kl_coef: float
) -> list[Tensor]:
    """Each sample's reward (already minus the group's mean) minus kl_coef * kl, per token."""
    return [float(reward) - kl_coef * one for one, reward in zip(kl, rewards, strict=True)]


def _whole(values: Any, response_length: int) -> Any:
    if len(values) != response_length:
        raise ValueError(
            f"{len(values)} values for a response of {response_length} tokens: pass whole responses, also with context"
            " parallelism"
        )
    return values


def get_response_lengths(loss_masks: list[list[int]]) -> list[int]:
    """Number of tokens from the first trained one to the end; 0 without trained tokens."""
    return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Loss masks for a fast tokenizer; `tokenizer_type` is a --loss-mask-type."""

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        if tokenizer_type not in LOSS_MASK_TYPES:
            raise ValueError(f"tokenizer_type {tokenizer_type!r} is unknown: use {', '.join(LOSS_MASK_TYPES)}")
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type

    def get_loss_mask(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[int]]:
        """Token ids of the conversation, and its mask: 1 for the assistant's tokens.

        A turn with `step_loss_mask` 0 is masked. Raises ValueError if the template rendered a different number of
        assistant turns.
        """
        conversation = masked_conversation(self.tokenizer, messages, self.tokenizer_type, tools=tools)
        return conversation.ids, conversation.mask

    def get_response_lengths(self, loss_masks: list[list[int]]) -> list[int]:
        """See the function `get_response_lengths`."""
        return get_response_lengths(loss_masks)

    def get_text_from_loss_mask(self, token_ids: list[int], loss_masks: list[int]) -> list[str]:
        """The texts of consecutive trained tokens, in order."""
        runs = itertools.groupby(zip(token_ids, loss_masks, strict=True), key=lambda pair: pair[1])
        return [self.tokenizer.decode([token for token, _ in pairs]) for trained, pairs in runs if trained]
