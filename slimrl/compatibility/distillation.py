"""slime's reward functions of on-policy distillation with a teacher on SGLang servers.

There they fetch the teacher's log-probabilities and give every response the reward 0. Here `--use-opd --opd-type
sglang` fetches them, with or without these functions, and only the reward is left.
"""

from __future__ import annotations

from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample


async def reward_func(args: Arguments, sample: Sample, **kwargs: Any) -> float:
    """0, for `--custom-rm-path`. Raises ValueError without a teacher on servers: nothing would be learned."""
    if not args.has_served_teacher:
        raise ValueError("this reward is always 0 and needs a teacher: add --use-opd --opd-type sglang")
    return 0.0


def post_process_rewards(args: Arguments, samples: list[Sample], **kwargs: Any) -> tuple[list[float], list[float]]:
    """0 for every sample, for `--custom-reward-post-process-path`."""
    return [0.0] * len(samples), [0.0] * len(samples)
