"""Custom advantages: the reward of an answer, discounted towards its first token.

    --custom-advantage-function-path examples.advantages.discounted

`custom: {discount: 0.99}` in --custom-config-path sets the discount per token. The KL penalty of --kl-coef is
subtracted. A rank has only its own samples, and those of one prompt may be on several ranks: to compare answers, use
--custom-reward-post-process-path, see examples/reward.py.
"""

from __future__ import annotations

from typing import Any

import torch

from slimrl.arguments import Arguments

DISCOUNT = 0.99


def discounted(args: Arguments, rollout_data: dict[str, Any]) -> None:
    """`reward * discount^(tokens that follow) - kl_coef * kl`, at each token."""
    discount = args.custom.get("discount", DISCOUNT)
    columns = zip(rollout_data["rewards"], rollout_data["kl"], strict=True)
    rollout_data["advantages"] = [
        reward * discount ** torch.arange(kl.numel() - 1, -1, -1, device=kl.device) - args.kl_coef * kl
        for reward, kl in columns
    ]
    rollout_data["returns"] = rollout_data["advantages"]
