"""slime's helpers for metrics, by slimrl's definitions (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slimrl.rollout.metrics import PASS_REWARD, mean, pass_at_k


def dict_add_prefix(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The same with `prefix` before each name."""
    return {f"{prefix}{name}": value for name, value in values.items()}


def compute_pass_rate(
    flat_rewards: Sequence[float], group_size: int, num_groups: int | None = None
) -> dict[str, float]:
    """`pass@k` for k = 1, 2, 4, ... up to `group_size`, the mean over groups end to end; {} for groups of one.

    Raises ValueError where the rewards are no `num_groups` groups.
    """
    count = len(flat_rewards) // group_size if num_groups is None else num_groups
    if len(flat_rewards) != count * group_size:
        raise ValueError(f"{len(flat_rewards)} rewards are not {count} groups of {group_size}")
    if group_size == 1 or not count:
        return {}
    groups = [flat_rewards[start : start + group_size] for start in range(0, len(flat_rewards), group_size)]
    passed = [sum(reward >= PASS_REWARD for reward in group) for group in groups]
    ks = [1 << power for power in range(group_size.bit_length())]
    return {f"pass@{k}": mean([pass_at_k(group_size, one, k) for one in passed]) for k in ks}
