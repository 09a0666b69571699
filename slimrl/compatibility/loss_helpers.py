"""slime's helpers around losses, with slimrl's formulas, and its loss masks of multi-turn conversations.

Custom functions of training see whole responses in every parallel layout, so that helpers of context parallelism return
what they are given. The masks are those of supervised training (`slimrl.rollout.sft_rollout`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slimrl.algorithms.kl import KLKind, kl_estimate
from slimrl.algorithms.off_policy import sequence_log_ratio
from slimrl.algorithms.policy_loss import clipped_policy_loss
from slimrl.algorithms.reduction import masked_mean_per_sample_sum, masked_sum
from slimrl.algorithms.returns import discounted_returns, reward_at_the_end
from slimrl.rollout.sft_rollout import TURN_MARKS, assistant_spans, conversation_mask, trained_turns


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


def get_response_lengths(loss_masks: list[list[int]]) -> list[int]:
    """Tokens from the first trained one to the end; 0 where none is trained on."""
    return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Masks for one tokenizer, which must be a fast one; `tokenizer_type` says how its template marks turns."""

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        if tokenizer_type not in TURN_MARKS:
            raise ValueError(f"tokenizer_type {tokenizer_type!r} is not known: use {', '.join(TURN_MARKS)}")
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type

    def get_loss_mask(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[int]]:
        """Token ids of the conversation, and a 1 for each that the assistant wrote.

        A turn whose `step_loss_mask` is 0 is left out.
        Raises ValueError where the template wrote another number of the assistant's turns than there are.
        """
        text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = assistant_spans(text, TURN_MARKS[self.tokenizer_type])
        mask = conversation_mask(encoded["offset_mapping"], spans, trained_turns(messages))
        return list(encoded["input_ids"]), mask

    def get_response_lengths(self, loss_masks: list[list[int]]) -> list[int]:
        """As the function of that name."""
        return get_response_lengths(loss_masks)

    def get_text_from_loss_mask(self, token_ids: list[int], loss_masks: list[int]) -> list[str]:
        """The texts of the trained stretches, in order."""
        runs = itertools.groupby(zip(token_ids, loss_masks, strict=True), key=lambda pair: pair[1])
        return [self.tokenizer.decode([token for token, _ in pairs]) for trained, pairs in runs if trained]
