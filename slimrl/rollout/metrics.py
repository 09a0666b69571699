"""Metrics of a rollout and of an evaluation, computed from their samples: flat dicts of plain numbers.

`slimrl.observability.metrics.registry` (docs/metrics.md) defines every name.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from slimrl.algorithms.estimators import OverlongPenalty
from slimrl.arguments import Arguments
from slimrl.data.sample import PackedColumn, Sample, SampleStatus
from slimrl.rollout.generation.multi_turn import NON_GENERATION_TIME, TURN_STARTS
from slimrl.rollout.rm_hub.process_reward import STEP_REWARDS
from slimrl.rollout.rm_hub.scorer import REWARD_FAILURE_KEY

# metadata of a carried-over sample: the rollout in which its first token was generated
START_ROLLOUT_ID = "start_rollout_id"

# a sample passes with this reward or more
PASS_REWARD = 1.0

_REPETITION_TAIL_CHARS = 10_000
_REPETITION_MIN_CHARS = 200
_REPETITION_RATIO = 10.0


def sample_metrics(samples: list[Sample], raw_rewards: Sequence[float]) -> dict[str, float]:
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
        **_step_metrics(samples),
    }


def _step_metrics(samples: list[Sample]) -> dict[str, float]:
    """Steps per sample and their mean reward; nothing without --rm-step-separator."""
    of_samples = [sample.metadata[STEP_REWARDS] for sample in samples if STEP_REWARDS in sample.metadata]
    if not of_samples:
        return {}
    every = [reward for rewards in of_samples for reward in rewards]
    means = {"rollout/step_reward": mean(every)} if every else {}
    return {"rollout/steps": len(every) / len(of_samples), **means}


def dynamic_filter_metrics(drops: dict[str, int], carried_over: int) -> dict[str, float]:
    """Groups dropped by the dynamic sampling filter, by reason, and groups carried over."""
    dropped = {f"rollout/dynamic_filter/drop_{reason}": float(count) for reason, count in sorted(drops.items())}
    return {**dropped, "rollout/dynamic_filter/carried_over": float(carried_over)}


def partial_metrics(
    rollout_id: int, accepted: list[list[Sample]], carried_over: list[list[Sample]]
) -> dict[str, float]:
    """Metrics of `--partial-rollout`: continued samples and groups carried over."""
    started = [sample.metadata.get(START_ROLLOUT_ID, rollout_id) for group in accepted for sample in group]
    left = [sample for group in carried_over for sample in group]
    unfinished = [sample for sample in left if sample.status in (SampleStatus.PENDING, SampleStatus.ABORTED)]
    return {
        "rollout/partial/continued": float(sum(first < rollout_id for first in started)),
        "rollout/partial/oldest": float(rollout_id - min(started)),
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
    """Probability that k of n samples, `passed` of which pass, include a passing one: `1 - C(n - passed, k) / C(n, k)`.

    Chen et al. 2021 (Codex), equation 1.
    """
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def ks_of(n: int) -> list[int]:
    """The k of pass@k for groups of n samples: 1, 2, 4, ... and n."""
    return sorted({1 << power for power in range(n.bit_length()) if 1 << power <= n} | {n})


def is_repetitive(text: str) -> bool:
    """Whether zlib compresses the last 10 000 characters more than tenfold; prose compresses two- to fourfold."""
    tail = text[-_REPETITION_TAIL_CHARS:].encode(errors="replace")
    return len(tail) >= _REPETITION_MIN_CHARS and len(tail) > _REPETITION_RATIO * len(zlib.compress(tail, 1))


def _zero_std_metrics(samples: list[Sample], rewards: list[float]) -> dict[str, float]:
    groups: dict[int | None, list[float]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        groups.setdefault(sample.group_index, []).append(reward)
    # + 0.0: a small negative reward must not become a separate "-0"
    flat = Counter(round(group[0], 1) + 0.0 for group in groups.values() if min(group) == max(group))
    counts = {f"rollout/zero_std/count_{reward:g}": float(count) for reward, count in sorted(flat.items())}
    return {"rollout/zero_std/ratio": sum(flat.values()) / len(groups), **counts}


# metadata of a sample: its number of turns, set by custom functions
ROUND_NUMBER = "round_number"


@dataclasses.dataclass(frozen=True)
class RolloutMetricsConfig:
    """Which metrics are reported; `category` is an entry of dict rewards."""

    replayed: bool  # the rollout comes from a dump: it has no throughput
    passrate: bool
    multi_turn: bool
    correct_samples: bool
    category: str | None
    gpus: int | None
    max_response_len: int
    overlong: OverlongPenalty | None
    teacher_key: str | None  # of metadata, with several teachers

    @classmethod
    def from_args(cls, args: Arguments) -> RolloutMetricsConfig:
        """Reads the flags."""
        return cls(
            replayed=args.debug_train_only,
            passrate=args.log_passrate,
            multi_turn=args.log_multi_turn,
            correct_samples=args.log_correct_samples,
            category=args.log_reward_category,
            gpus=args.rollout_num_gpus,
            max_response_len=args.rollout_max_response_len,
            overlong=OverlongPenalty.if_given(
                args.rollout_max_response_len, args.overlong_buffer_len, args.overlong_penalty_factor
            ),
            teacher_key=args.opd_teacher_key if args.has_served_teacher and args.opd_teacher_names else None,
        )


def rollout_metrics(
    config: RolloutMetricsConfig, samples: list[Sample], raw_rewards: Sequence[float], seconds: float
) -> dict[str, float]:
    """Metrics by full name; `seconds` is the time of generation and scoring, `raw_rewards` [n] as `samples`."""
    metrics = sample_metrics(samples, raw_rewards)
    if not config.replayed:
        metrics |= throughput(samples, seconds, config.gpus)
    if config.passrate:
        metrics |= pass_rates(samples, raw_rewards)
    if config.multi_turn:
        metrics |= turn_metrics(samples, config.max_response_len)
    if config.category is not None:
        metrics |= category_metrics(samples, config.category)
    if config.correct_samples:
        metrics |= correct_metrics(samples, raw_rewards)
    if config.overlong is not None:
        metrics |= overlong_metrics(samples, config.overlong)
    if config.teacher_key is not None:
        metrics |= teacher_metrics(samples, config.teacher_key)
    return metrics


def trained_tokens(sample: Sample) -> int:
    """Response tokens that are trained on."""
    return 0 if sample.remove_sample else sample.effective_response_length


def throughput(samples: list[Sample], seconds: float, gpus: int | None) -> dict[str, float]:
    """Tokens per second, and the time that samples spent in tools, if any did."""
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
    """Response lengths with and without tool tokens, and turns; a sample with an unknown number of turns counts one."""
    lengths = length_statistics([sample.response_length for sample in samples])
    trained = length_statistics([trained_tokens(sample) for sample in samples])
    rounds = length_statistics([_rounds(sample) for sample in samples])
    clipped = mean([float(sample.response_length >= max_response_len) for sample in samples])
    return {
        **{f"multi_turn/raw_response_length/response_length_{key}": lengths[key] for key in ("mean", "max", "min")},
        "multi_turn/raw_response_length/response_length_clip_ratio": clipped,
        **{f"multi_turn/wo_obs_response_length/response_length_{key}": trained[key] for key in ("mean", "max", "min")},
        **{f"multi_turn/round_number_{key}": rounds[key] for key in ("mean", "max", "min")},
    }


def _rounds(sample: Sample) -> int:
    if ROUND_NUMBER in sample.metadata:
        return int(sample.metadata[ROUND_NUMBER])
    return len(sample.metadata.get(TURN_STARTS, [0]))


def overlong_metrics(samples: list[Sample], penalty: OverlongPenalty) -> dict[str, float]:
    """The mean of what is added to the rewards for long responses, and the share of samples with a penalty."""
    penalties = [penalty(sample.response_length) for sample in samples]
    return {
        "rollout/overlong_penalty": mean(penalties),
        "rollout/overlong_ratio": sum(value < 0 for value in penalties) / len(penalties),
    }


def teacher_metrics(samples: list[Sample], key: str) -> dict[str, float]:
    """Samples of each of several teachers, and their sampled reverse KL: engine - teacher log-probability.

    The mean over the trained tokens of a sample, then over samples that have any. `key` names the teacher in metadata.
    """
    of_teachers: dict[str, list[float]] = {}
    counts: Counter[str] = Counter()
    for sample in samples:
        name = str(sample.metadata.get(key))
        counts[name] += 1
        engine, teacher, mask = map(
            _numbers, map(sample.column, ("rollout_log_probs", "teacher_log_probs", "loss_mask"))
        )
        if engine is None or teacher is None or sample.remove_sample:
            continue
        mask = [1] * sample.response_length if mask is None else mask
        gaps = [one - other for one, other, trained in zip(engine, teacher, mask, strict=True) if trained]
        if gaps:
            of_teachers.setdefault(name, []).append(mean(gaps))
    divergences = {f"rollout/teacher/{name}/opd_reverse_kl": mean(values) for name, values in of_teachers.items()}
    return {f"rollout/teacher/{name}/samples": float(count) for name, count in counts.items()} | divergences


def _numbers(column: Any) -> Any:
    """A column of a sample as a list; the sample keeps it packed."""
    return column.tolist() if isinstance(column, PackedColumn) else column


def category_metrics(samples: list[Sample], key: str) -> dict[str, float]:
    """Fraction of samples by an entry of their reward; "missing" if the reward has no such entry, or failed."""
    found = Counter(
        str(sample.reward[key]) if isinstance(sample.reward, dict) and key in sample.reward else "missing"
        for sample in samples
    )
    return {f"rollout/error_cat/{name}": count / len(samples) for name, count in sorted(found.items())}


def correct_metrics(samples: list[Sample], raw_rewards: Sequence[float]) -> dict[str, float]:
    """Fraction of samples with reward 1 or more, and percentiles of their lengths (nearest rank)."""
    correct = [
        sample.response_length for sample, reward in zip(samples, raw_rewards, strict=True) if reward >= PASS_REWARD
    ]
    found = {"rollout/correct_ratio": len(correct) / len(samples)}
    ordered = sorted(correct)
    for percent in (25, 50, 75, 100) if ordered else ():
        found[f"rollout/correct_length/p{percent}"] = float(ordered[-(-percent * len(ordered) // 100) - 1])
    return found


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """The result of one dataset; `samples` and `rewards` are in the order of the rows, repeats adjacent."""

    name: str
    rewards: list[float]
    samples: list[Sample]
    n_samples_per_prompt: int

    @property
    def mean_reward(self) -> float:
        """Mean over all samples; the accuracy if rewards are 0 and 1."""
        return mean(self.rewards)

    @property
    def pass_rate(self) -> float:
        """Fraction of prompts with at least one sample of reward 1 or more."""
        return self.pass_at(self.n_samples_per_prompt)

    @property
    def truncated_ratio(self) -> float:
        """Fraction of samples that reached the length limit."""
        return mean([float(sample.status is SampleStatus.TRUNCATED) for sample in self.samples])

    def pass_at(self, k: int) -> float:
        """Mean over prompts of the probability that k of their samples (without replacement) include a passing one."""
        n = self.n_samples_per_prompt
        groups = [self.rewards[start : start + n] for start in range(0, len(self.rewards), n)]
        return mean([pass_at_k(n, sum(reward >= PASS_REWARD for reward in group), k) for group in groups])

    def metrics(self) -> dict[str, float]:
        """Metrics `eval/<name>...`; pass@k for k = 1, 2, 4, ... and the group size."""
        prefix = f"eval/{self.name}"
        n = self.n_samples_per_prompt
        lengths = length_statistics([sample.response_length for sample in self.samples])
        return {
            prefix: self.mean_reward,
            f"{prefix}-truncated_ratio": self.truncated_ratio,
            f"{prefix}-reward_failures": float(sum(REWARD_FAILURE_KEY in sample.metadata for sample in self.samples)),
            **{f"{prefix}-pass@{k}": self.pass_at(k) for k in ks_of(n)},
            **{f"{prefix}/response_len/{name}": value for name, value in lengths.items()},
        }


@dataclasses.dataclass(frozen=True)
class EvaluationReport:
    """The metrics of one dataset, without its samples."""

    mean_reward: float
    scalars: dict[str, float]

    @classmethod
    def of_held_out(cls, name: str, metrics: dict[str, float]) -> EvaluationReport:
        """Of a held-out set: the accuracy of preferences, the perplexity of conversations, the mean error of scores.

        `metrics` are those of an optimizer step.
        """
        if "absolute_error" in metrics:
            error = metrics["absolute_error"]
            return cls(error, {f"eval/{name}": error, f"eval/{name}-loss": metrics["loss"]})
        if "perplexity" in metrics:
            perplexity = metrics["perplexity"]
            return cls(perplexity, {f"eval/{name}": perplexity, f"eval/{name}-loss": metrics["loss"]})
        accuracy = metrics["label_accuracy" if "label_accuracy" in metrics else "pair_accuracy"]
        values = {f"eval/{name}-{kind}": metrics[kind] for kind in ("loss", "reward_margin") if kind in metrics}
        return cls(accuracy, {f"eval/{name}": accuracy, **values})

    def metrics(self) -> dict[str, float]:
        """Scalars under their full names, `eval/...`."""
        return self.scalars
