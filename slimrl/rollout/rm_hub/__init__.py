"""Rewards: built-in graders by `--rm-type`, custom functions by `--custom-rm-path`; entry point `async_rm`."""

from slimrl.rollout.rm_hub.scorer import RewardConfig, RewardScorer, async_rm, batched_async_rm

__all__ = ["RewardConfig", "RewardScorer", "async_rm", "batched_async_rm"]
