"""From judged samples to the rewards that are trained on: raw, and normalised within each prompt's group."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from slimrl.algorithms.advantages import group_normalized_rewards
from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.hooks import RewardPostProcess, named


@dataclasses.dataclass(frozen=True)
class Rewards:
    """float32 [n] each, in the order of the samples."""

    raw: Tensor
    normalized: Tensor


def rewards_of(args: Arguments, samples: list[Sample]) -> Rewards:
    """Raw rewards (the `--reward-key` entry where they are dicts) and what is trained on.

    Groups are told by `group_index`, whatever their size and place. `--custom-reward-post-process-path` replaces both.
    Raises ValueError where a sample has no finite reward, or the user's function returns the wrong number of them.
    """
    if args.custom_reward_post_process_path is not None:
        process = named("--custom-reward-post-process-path", args.custom_reward_post_process_path, RewardPostProcess)
        raw, normalized = (torch.as_tensor(column, dtype=torch.float32) for column in process(args, samples))
        if raw.shape != (len(samples),) or normalized.shape != (len(samples),):
            raise ValueError(
                f"--custom-reward-post-process-path {args.custom_reward_post_process_path} returned rewards of shapes"
                f" {list(raw.shape)} and {list(normalized.shape)}: return two lists of {len(samples)} numbers"
            )
        _check_finite(args.custom_reward_post_process_path, samples, raw, normalized)
        return Rewards(raw, normalized)
    raw = torch.tensor([sample.reward_value(args.reward_key) for sample in samples], dtype=torch.float32)
    if not args.rewards_normalization or args.advantage_estimator == "reinforce_plus_plus":
        return Rewards(raw, raw.clone())  # REINFORCE++ whitens over the whole batch instead
    group_ids = torch.tensor([sample.group_index for sample in samples], dtype=torch.int64)
    # the baseline variant of REINFORCE++ takes the group's mean away and leaves the scale to the whitening
    scale = args.grpo_std_normalization and args.advantage_estimator != "reinforce_plus_plus_baseline"
    return Rewards(raw, group_normalized_rewards(raw, group_ids, scale_by_std=scale))


def _check_finite(path: str, samples: list[Sample], raw: Tensor, normalized: Tensor) -> None:
    for sample, *rewards in zip(samples, raw.tolist(), normalized.tolist(), strict=True):
        if not all(map(math.isfinite, rewards)):
            raise ValueError(
                f"--custom-reward-post-process-path {path} returned {' and '.join(map(str, rewards))} as rewards of"
                f" sample {sample.index}: return finite numbers"
            )
