"""Everything that a finished rollout reports: of every run, its speed, and what `--log-...` flags ask for.

Names and meanings: `slimrl.observability.metrics.registry`. Called by the rollout manager, once per rollout.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.rollout.generation.multi_turn import NON_GENERATION_TIME, TURN_STARTS
from slimrl.rollout.metrics import PASS_REWARD, ks_of, length_statistics, mean, pass_at_k, rollout_metrics

# metadata of a sample whose own function counts its turns
ROUND_NUMBER = "round_number"


def all_metrics(
    args: Arguments, samples: list[Sample], raw_rewards: Sequence[float], seconds: float
) -> dict[str, float]:
    """Flat numbers by full names; `seconds` is the time of generating and judging, `raw_rewards` [n] as `samples`."""
    metrics = rollout_metrics(samples, raw_rewards)
    if not args.debug_train_only:  # what is replayed was not generated
        metrics |= throughput(samples, seconds, args.rollout_num_gpus)
    if args.log_passrate:
        metrics |= pass_rates(samples, raw_rewards)
    if args.log_multi_turn:
        metrics |= turn_metrics(samples, args.rollout_max_response_len)
    if args.log_reward_category is not None:
        metrics |= category_metrics(samples, args.log_reward_category)
    if args.log_correct_samples:
        metrics |= correct_metrics(samples, raw_rewards)
    return metrics


def trained_tokens(sample: Sample) -> int:
    """Response tokens that are trained on."""
    if sample.remove_sample:
        return 0
    return sample.response_length if sample.loss_mask is None else sum(sample.loss_mask)


def throughput(samples: list[Sample], seconds: float, gpus: int | None) -> dict[str, float]:
    """Tokens by time, and the times that samples spent in tools, where any did."""
    found = {"perf/rollout_time": seconds}
    waited = [float(sample.metadata.get(NON_GENERATION_TIME, 0.0)) for sample in samples]
    kinds = {"": [sample.response_length for sample in samples], "effective_": list(map(trained_tokens, samples))}
    for kind, lengths in kinds.items():
        longest = max(lengths)
        if gpus:
            found[f"perf/{kind}tokens_per_gpu_per_sec"] = sum(lengths) / seconds / gpus
        found[f"perf/longest_{kind}sample_tokens_per_sec"] = longest / seconds
        tools = mean([time for time, length in zip(waited, lengths, strict=True) if length == longest])
        if any(waited) and tools < seconds:
            name = f"perf/longest_{kind}sample_tokens_per_sec_without_non_generation"
            found[name] = longest / (seconds - tools)
    if any(waited):
        times = {"mean": mean(waited), "median": statistics.median(waited), "max": max(waited), "min": min(waited)}
        found |= {f"perf/non_generation_time/{name}": value for name, value in times.items()}
    return found


def pass_rates(samples: list[Sample], raw_rewards: Sequence[float]) -> dict[str, float]:
    """Mean over groups of pass@k for every k that the smallest group has samples for."""
    groups: dict[int | None, list[bool]] = {}
    for sample, reward in zip(samples, raw_rewards, strict=True):
        groups.setdefault(sample.group_index, []).append(reward >= PASS_REWARD)
    passed = list(groups.values())
    return {
        f"passrate/pass@{k}": mean([pass_at_k(len(group), sum(group), k) for group in passed])
        for k in ks_of(min(map(len, passed)))
    }


def turn_metrics(samples: list[Sample], max_response_len: int) -> dict[str, float]:
    """Tokens with and without those of tools, and turns; samples of unknown turns count one."""
    lengths = length_statistics([sample.response_length for sample in samples])
    own = length_statistics([trained_tokens(sample) for sample in samples])
    rounds = length_statistics([_rounds(sample) for sample in samples])
    clipped = mean([float(sample.response_length >= max_response_len) for sample in samples])
    return {
        **{f"multi_turn/raw_response_length/response_length_{key}": lengths[key] for key in ("mean", "max", "min")},
        "multi_turn/raw_response_length/response_length_clip_ratio": clipped,
        **{f"multi_turn/wo_obs_response_length/response_length_{key}": own[key] for key in ("mean", "max", "min")},
        **{f"multi_turn/round_number_{key}": rounds[key] for key in ("mean", "max", "min")},
    }


def _rounds(sample: Sample) -> int:
    if ROUND_NUMBER in sample.metadata:
        return int(sample.metadata[ROUND_NUMBER])
    return len(sample.metadata.get(TURN_STARTS, [0]))


def category_metrics(samples: list[Sample], key: str) -> dict[str, float]:
    """Shares of the samples by an entry of their reward; "missing" where it has none, or no score was found."""
    found = Counter(
        str(sample.reward[key]) if isinstance(sample.reward, dict) and key in sample.reward else "missing"
        for sample in samples
    )
    return {f"rollout/error_cat/{name}": count / len(samples) for name, count in sorted(found.items())}


def correct_metrics(samples: list[Sample], raw_rewards: Sequence[float]) -> dict[str, float]:
    """How many samples have reward 1 or more, and quantiles of their lengths (nearest rank)."""
    correct = [
        sample.response_length for sample, reward in zip(samples, raw_rewards, strict=True) if reward >= PASS_REWARD
    ]
    found = {"rollout/correct_ratio": len(correct) / len(samples)}
    ordered = sorted(correct)
    for percent in (25, 50, 75, 100) if ordered else ():
        found[f"rollout/correct_length/p{percent}"] = float(ordered[-(-percent * len(ordered) // 100) - 1])
    return found
