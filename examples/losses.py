"""A loss of one's own: the clipped policy loss of the tokens at which the model hesitates most.

    --loss-type custom_loss --custom-loss-function-path examples.losses.high_entropy

In each answer the tokens of highest entropy are trained on, a fifth of them (Wang et al. 2025, "Beyond the 80/20
rule"); `custom: {entropy_share: 0.5}` in --custom-config-path takes half of them, 1 all.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.hooks import LossBatch

SHARE = 0.2


def high_entropy(
    args: Arguments, batch: LossBatch, logits: Tensor, sum_of_sample_mean: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sums over samples of means over their chosen tokens: the loss, and what is logged of them."""
    log_probs, entropy = batch.scores(logits)
    ratio = (log_probs - torch.cat(batch["log_probs"])).exp()
    advantages = torch.cat(batch["advantages"])
    bounded = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
    values = torch.maximum(-ratio * advantages, -bounded * advantages)

    share = args.custom.get("entropy_share", SHARE)
    parts = zip(entropy.detach().split(batch["response_lengths"]), batch["loss_masks"], strict=True)
    weights = torch.cat([chosen_weights(own, mask, share) for own, mask in parts])
    loss = sum_of_sample_mean(values * weights)
    return loss, {"chosen_entropy": sum_of_sample_mean(entropy * weights), "entropy": sum_of_sample_mean(entropy)}


def chosen_weights(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """[tokens] of one sample: `trained / chosen` at the trained tokens of highest entropy, 0 elsewhere.

    So the mean over trained tokens of what is weighted is the mean over chosen ones.
    """
    trained = int(mask.sum())
    chosen = math.ceil(share * trained)
    weights = torch.zeros_like(mask)
    highest = entropy.masked_fill(mask == 0, -1.0).topk(chosen).indices
    weights[highest] = trained / max(chosen, 1)
    return weights
