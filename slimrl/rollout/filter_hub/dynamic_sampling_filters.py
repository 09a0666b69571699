"""Dynamic sampling as in DAPO (Yu et al. 2025, section 3.2): groups that teach nothing are not trained on."""

from __future__ import annotations

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.rollout.filter_hub.base_types import DynamicFilterOutput


def check_reward_nonzero_std(args: Arguments, samples: list[Sample]) -> DynamicFilterOutput:
    """Keeps a group whose rewards differ: equal rewards have advantage zero. Rewards count as equal within 1e-6."""
    rewards = [sample.reward_value(args.reward_key) for sample in samples]
    if max(rewards) - min(rewards) > 1e-6:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{rewards[0]:.1f}")
