"""Rewards: built-in graders by `--rm-type`, the user's own by `--custom-rm-path`, one door `async_rm`."""

from slimrl.rollout.rm_hub.scorer import RewardConfig, RewardScorer, async_rm, batched_async_rm

__all__ = ["RewardConfig", "RewardScorer", "async_rm", "batched_async_rm"]
