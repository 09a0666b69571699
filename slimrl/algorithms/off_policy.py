"""Corrections for samples that another policy than the one in training has drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from slimrl.algorithms.reduction import sample_mean_weights

# exp(20) is far outside every bound; past it exp overflows and inf * 0 makes the gradient NaN.
_MAX_LOG_RATIO = 20.0


def truncated_importance_weights(
    train_log_probs: Tensor, rollout_log_probs: Tensor, *, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Per token: `clamp(exp(train - rollout), low, high)`, and the same without the clamp; both constants.

    Ionides 2008, "Truncated importance sampling", with the engine's probabilities as the proposal (Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training").
    """
    difference = (train_log_probs - rollout_log_probs).detach()
    weights = difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    return weights.clamp(low, high), weights


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """The mean over a sample's unmasked tokens of `log_probs - old_log_probs`, at each of its tokens.

    Its exponential is GSPO's importance ratio of a sequence: Zheng et al. 2025, equation 7. All are [tokens] with
    samples end to end but `lengths` [n]; differentiable in `log_probs`. A fully masked sample has 0.
    """
    weights = sample_mean_weights(mask, lengths)
    rows = torch.arange(lengths.numel(), device=mask.device)
    sample_of_token = torch.repeat_interleave(rows, lengths.to(mask.device), output_size=mask.numel())
    means = log_probs.new_zeros(lengths.numel()).index_add(0, sample_of_token, weights * (log_probs - old_log_probs))
    return means[sample_of_token]


def off_policy_sequences(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, lengths: Tensor, *, delta: float
) -> Tensor:
    """1 at the tokens of samples to leave out: advantage below 0 and mean `old - new` log-probability above `delta`.

    DeepSeek-V3.2 (2025), off-policy sequence masking, section 3.1. Float32 [tokens], a constant; a token's own
    advantage decides, which is the sample's where rewards are spread evenly.
    """
    drift = -sequence_log_ratio(log_probs.detach(), old_log_probs.detach(), mask, lengths)
    return ((advantages < 0) & (drift > delta)).to(torch.float32)
