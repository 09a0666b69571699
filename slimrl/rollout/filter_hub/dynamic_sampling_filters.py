"""Dynamic sampling as in DAPO (Yu et al. 2025, section 3.2): drops groups without a learning signal."""

from __future__ import annotations

import dataclasses

from slimrl.data.sample import Sample, SampleStatus
from slimrl.hooks.base import RunArguments
from slimrl.rollout.filter_hub.base_types import DynamicFilterOutput


def check_reward_nonzero_std(args: RunArguments, samples: list[Sample]) -> DynamicFilterOutput:
    """Keeps a group if its rewards differ by more than 1e-6: equal rewards have advantage zero."""
    rewards = [sample.reward_value(args.reward_key) for sample in samples]
    if max(rewards) - min(rewards) > 1e-6:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{rewards[0]:.1f}")


def check_reward_nonzero_std_with_fallback(args: RunArguments, samples: list[Sample]) -> DynamicFilterOutput:
    """Like `check_reward_nonzero_std`, but groups with equal rewards fill up the rollout if too few groups pass."""
    return dataclasses.replace(check_reward_nonzero_std(args, samples), keep_when_insufficient=True)


def check_any_completed(args: RunArguments, samples: list[Sample]) -> DynamicFilterOutput:
    """Keeps a group if at least one response ended before the length limit."""
    if any(sample.status is SampleStatus.COMPLETED for sample in samples):
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason="all_truncated")
