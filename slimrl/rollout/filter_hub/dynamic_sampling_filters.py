"""Dynamic sampling as in DAPO (Yu et al. 2025, section 3.2): groups that teach nothing are not trained on."""

from __future__ import annotations

import dataclasses

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample, SampleStatus
from slimrl.rollout.filter_hub.base_types import DynamicFilterOutput


def check_reward_nonzero_std(args: Arguments, samples: list[Sample]) -> DynamicFilterOutput:
    """Keeps a group whose rewards differ: equal rewards have advantage zero. Rewards count as equal within 1e-6."""
    rewards = [sample.reward_value(args.reward_key) for sample in samples]
    if max(rewards) - min(rewards) > 1e-6:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{rewards[0]:.1f}")


def check_reward_nonzero_std_with_fallback(args: Arguments, samples: list[Sample]) -> DynamicFilterOutput:
    """The same, but where too few groups of a wave pass, groups with equal rewards fill up the rollout."""
    return dataclasses.replace(check_reward_nonzero_std(args, samples), keep_when_insufficient=True)


def check_any_completed(args: Arguments, samples: list[Sample]) -> DynamicFilterOutput:
    """Keeps a group in which at least one response ended by itself, before the length limit."""
    if any(sample.status is SampleStatus.COMPLETED for sample in samples):
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason="all_truncated")
