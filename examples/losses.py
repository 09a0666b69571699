"""A custom loss: the clipped policy loss of the tokens with the highest entropy.

    --loss-type custom_loss --custom-loss-function-path examples.losses.high_entropy

In each answer only the 20% of tokens with the highest entropy are trained on (Wang et al. 2025, "Beyond the 80/20
rule"); `custom: {entropy_share: 0.5}` in --custom-config-path selects 50%, 1 all.
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
    """Loss and logged values: sums over samples of the means over their chosen tokens."""
    log_probs, entropy = batch.scores(logits)
    ratio = (log_probs - torch.cat(batch["log_probs"])).exp()
    advantages = torch.cat(batch["advantages"])
    bounded = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
    values = torch.maximum(-ratio * advantages, -bounded * advantages)

    share = args.custom.get("entropy_share", SHARE)
    parts = zip(entropy.detach().split(batch["response_lengths"]), batch["loss_masks"], strict=True)
    weights = torch.cat([chosen_weights(values, mask, share) for values, mask in parts])
    loss = sum_of_sample_mean(values * weights)
    return loss, {"chosen_entropy": sum_of_sample_mean(entropy * weights), "entropy": sum_of_sample_mean(entropy)}


def chosen_weights(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """[tokens] of one sample: `trained / chosen` at the trained tokens of highest entropy, 0 elsewhere.

    The mean of weighted values over trained tokens is then the mean over the chosen ones.
    """
    trained = int(mask.sum())
    chosen = math.ceil(share * trained)
    weights = torch.zeros_like(mask)
    highest = entropy.masked_fill(mask == 0, -1.0).topk(chosen).indices
    weights[highest] = trained / max(chosen, 1)
    return weights
