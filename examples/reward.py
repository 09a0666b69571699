"""A reward of one's own: the built-in verdict, less a penalty for long-winded answers.

--custom-rm-path examples.reward.judge --rm-type math --reward-key score
"""

from __future__ import annotations

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.rollout.rm_hub import async_rm

FREE_SHARE = 0.5  # of --rollout-max-response-len


async def judge(args: Arguments, sample: Sample) -> dict[str, float]:
    """`score` is 1 for a right answer, down to 0.5 for one as long as allowed, and 0 for a wrong one."""
    correct = await async_rm(args, sample)
    used = sample.response_length / args.rollout_max_response_len
    penalty = 0.5 * max(used - FREE_SHARE, 0.0) / (1.0 - FREE_SHARE)
    return {"score": correct * (1.0 - penalty), "correct": correct, "penalty": penalty}
