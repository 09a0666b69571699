"""What a rollout reports, computed from its samples: flat dicts of plain numbers.

Every name and its definition is in `slimrl.observability.metrics.registry` (docs/metrics.md).
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections import Counter
from collections.abc import Sequence

from slimrl.data.sample import Sample, SampleStatus
from slimrl.rollout.rm_hub.scorer import REWARD_FAILURE_KEY

# metadata of a sample that was carried over: the rollout in which its first token was generated
START_ROLLOUT_ID = "start_rollout_id"

# a sample passes with this reward or more
PASS_REWARD = 1.0

_REPETITION_TAIL_CHARS = 10_000
_REPETITION_MIN_CHARS = 200
_REPETITION_RATIO = 10.0


def rollout_metrics(samples: list[Sample], raw_rewards: Sequence[float]) -> dict[str, float]:
    """The metrics of one rollout; `raw_rewards` [n] (list or tensor) in the order of `samples`."""
    rewards = [float(reward) for reward in raw_rewards]
    if len(rewards) != len(samples) or not samples:
        raise ValueError(f"{len(samples)} samples with {len(rewards)} rewards: give at least one, and one reward each")
    lengths = length_statistics([sample.response_length for sample in samples])
    return {
        "rollout/raw_reward": mean(rewards),
        "rollout/raw_reward_std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        **{f"rollout/response_len/{name}": value for name, value in lengths.items()},
        "rollout/prompt_len/mean": mean([sample.prompt_length for sample in samples]),
        "rollout/truncated_ratio": mean([float(sample.status is SampleStatus.TRUNCATED) for sample in samples]),
        "rollout/repetition_frac": mean([float(is_repetitive(sample.response)) for sample in samples]),
        "rollout/reward_failures": float(sum(REWARD_FAILURE_KEY in sample.metadata for sample in samples)),
        **_zero_std_metrics(samples, rewards),
    }


def dynamic_filter_metrics(drops: dict[str, int], carried_over: int) -> dict[str, float]:
    """What the dynamic sampling filter did, by reason."""
    dropped = {f"rollout/dynamic_filter/drop_{reason}": float(count) for reason, count in sorted(drops.items())}
    return {**dropped, "rollout/dynamic_filter/carried_over": float(carried_over)}


def partial_metrics(
    rollout_id: int, accepted: list[list[Sample]], carried_over: list[list[Sample]]
) -> dict[str, float]:
    """What `--partial-rollout` did in this rollout."""
    begun = [sample.metadata.get(START_ROLLOUT_ID, rollout_id) for group in accepted for sample in group]
    left = [sample for group in carried_over for sample in group]
    unfinished = [sample for sample in left if sample.status in (SampleStatus.PENDING, SampleStatus.ABORTED)]
    return {
        "rollout/partial/continued": float(sum(first < rollout_id for first in begun)),
        "rollout/partial/oldest": float(rollout_id - min(begun)),
        "rollout/partial/carried_over": float(len(carried_over)),
        "rollout/partial/unfinished": float(len(unfinished)),
    }


def length_statistics(lengths: list[int]) -> dict[str, float]:
    """Mean, median, max and min of token counts."""
    return {
        "mean": mean(lengths),
        "median": float(statistics.median(lengths)),
        "max": float(max(lengths)),
        "min": float(min(lengths)),
    }


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; the sum is exact, so the order of the samples does not matter."""
    return math.fsum(values) / len(values)


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Chance that k of n samples, `passed` of which pass, hold one that does: `1 - C(n - passed, k) / C(n, k)`.

    Chen et al. 2021 (Codex), equation 1.
    """
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def ks_of(n: int) -> list[int]:
    """The k of pass@k for groups of n samples: 1, 2, 4, ... and n."""
    return sorted({1 << power for power in range(n.bit_length()) if 1 << power <= n} | {n})


def is_repetitive(text: str) -> bool:
    """Whether the last 10 000 characters shrink more than tenfold under zlib; prose shrinks two- to fourfold."""
    tail = text[-_REPETITION_TAIL_CHARS:].encode(errors="replace")
    return len(tail) >= _REPETITION_MIN_CHARS and len(tail) > _REPETITION_RATIO * len(zlib.compress(tail, 1))


def _zero_std_metrics(samples: list[Sample], rewards: list[float]) -> dict[str, float]:
    groups: dict[int | None, list[float]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        groups.setdefault(sample.group_index, []).append(reward)
    # + 0.0: a small negative reward is no group of its own, "-0"
    flat = Counter(round(group[0], 1) + 0.0 for group in groups.values() if min(group) == max(group))
    counts = {f"rollout/zero_std/count_{reward:g}": float(count) for reward, count in sorted(flat.items())}
    return {"rollout/zero_std/ratio": sum(flat.values()) / len(groups), **counts}
