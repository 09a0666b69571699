"""Custom rewards: of one answer, of all answers to a prompt, and the rewards to train on.

--custom-rm-path examples.reward.judge --rm-type math --reward-key score
--custom-rm-path examples.reward.shortest_wins --group-rm --rm-type math
--custom-reward-post-process-path examples.reward.leave_one_out
"""

from __future__ import annotations

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.rollout.rm_hub import async_rm

FREE_SHARE = 0.5  # of --rollout-max-response-len


async def judge(args: Arguments, sample: Sample) -> dict[str, float]:
    """`score` is 1 for a right answer, down to 0.5 at the maximum length, and 0 for a wrong answer."""
    correct = await async_rm(args, sample)
    used = sample.response_length / args.rollout_max_response_len
    penalty = 0.5 * max(used - FREE_SHARE, 0.0) / (1.0 - FREE_SHARE)
    return {"score": correct * (1.0 - penalty), "correct": correct, "penalty": penalty}


async def shortest_wins(args: Arguments, samples: list[Sample]) -> list[float]:
    """1 for the shortest of the right answers to a prompt, 0.5 for other right ones, 0 for wrong ones."""
    correct = [await async_rm(args, sample) > 0 for sample in samples]
    right = [sample.response_length for sample, good in zip(samples, correct, strict=True) if good]
    return [
        0.0 if not good else 1.0 if sample.response_length == min(right) else 0.5
        for sample, good in zip(samples, correct, strict=True)
    ]


def leave_one_out(args: Arguments, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Raw rewards, and rewards minus the mean of the *other* answers to the prompt (RLOO; Ahmadian et al. 2024)."""
    raw = [sample.reward_value(args.reward_key) for sample in samples]
    totals: dict[int | None, list[float]] = {}
    for sample, reward in zip(samples, raw, strict=True):
        totals.setdefault(sample.group_index, []).append(reward)
    trained = []
    for sample, reward in zip(samples, raw, strict=True):
        group = totals[sample.group_index]
        others = len(group) - 1
        trained.append(reward - (sum(group) - reward) / others if others else 0.0)
    return raw, trained
