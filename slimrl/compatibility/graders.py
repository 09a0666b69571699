"""slime's graders, reward functions and metric helpers as ordinary functions, with slimrl's grading rules and metrics.

Answers are graded by equivalence. Grading that takes more than a comparison runs in a separate process with a time
limit, and the caller blocks; if it fails, the answer counts as wrong. `async_rm` does the same without blocking other
samples. docs/metrics.md describes the metrics.

slime's reward functions of on-policy distillation fetch the log-probabilities of a teacher on SGLang servers and give
every response the reward 0. Here `--use-opd --opd-type sglang` fetches them, with or without these functions, and only
the reward is left.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slimrl.arguments import Arguments
from slimrl.compatibility.rollout_helpers import run
from slimrl.data.sample import Sample
from slimrl.rollout.metrics import PASS_REWARD, mean, pass_at_k
from slimrl.rollout.rm_hub import rule_reward
from slimrl.rollout.rm_hub.grader_pool import GraderFailure, GraderPool

_TAIL_CHARS = 300


def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> dict[str, Any]:
    """`{"score": 1.0 or -1.0, "acc", "pred"}` of the last "Answer: ...", or of the last box, near the end."""
    if pause_tokens_index is not None:
        raise ValueError("pause_tokens_index is unsupported: leave it out")
    tail = solution_str[-_TAIL_CHARS:]
    return _graded("boxed_dapo" if strict_box_verify else "dapo", tail, ground_truth)


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    """Whether the last box of a solution is equivalent to the truth; False without a truth."""
    if ground_truth is None or ground_truth == "":
        return False
    return bool(_graded("math", solution_str, ground_truth))


def answers_are_equal(given_answer: str, ground_truth: Any) -> bool:
    """Whether two answers are equivalent."""
    return grade_answer_verl(f"\\boxed{{{given_answer}}}", ground_truth)


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """1 if the last box after the thinking is equivalent to the label, else 0."""
    return int(_graded("deepscaler", response, label))


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """F1, precision and recall of the words shared with the truth."""
    if prediction is None or (score := rule_reward.f1(prediction, ground_truth)) == 0:
        return 0.0, 0.0, 0.0
    words, expected = rule_reward.normalized(prediction), rule_reward.normalized(ground_truth)
    shared = sum((Counter(words) & Counter(expected)).values())
    return score, shared / max(len(words), 1), shared / max(len(expected), 1)


def compute_gpqa_reward(response: str, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """1.0 if the response chooses the right letter, else 0.0."""
    return float(_graded("gpqa", response, label, metadata))


def _graded(rm_type: str, response: str, label: Any, metadata: dict[str, Any] | None = None) -> Any:
    sample = Sample(response=response, label=label, metadata=dict(metadata or {}))
    try:
        return run(rule_reward.grade(rm_type, sample, _graders()))
    except GraderFailure:
        return rule_reward.wrong_answer_reward(rm_type)


@functools.cache
def _graders() -> GraderPool:
    """A pool of one grader, which ends with this process."""
    return GraderPool(size=1)


def dict_add_prefix(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """A copy with `prefix` before each name."""
    return {f"{prefix}{name}": value for name, value in values.items()}


def compute_pass_rate(
    flat_rewards: Sequence[float], group_size: int, num_groups: int | None = None
) -> dict[str, float]:
    """`pass@k` for k = 1, 2, 4, ... up to `group_size`, the mean over groups end to end; {} for groups of one.

    Raises ValueError if the number of rewards does not match `num_groups`.
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


async def reward_func(args: Arguments, sample: Sample, **kwargs: Any) -> float:
    """0, for `--custom-rm-path`. Raises ValueError without a teacher: nothing would be learned."""
    if not args.use_opd:
        raise ValueError("this reward is always 0 and needs a teacher: add --use-opd --opd-type sglang")
    return 0.0


def post_process_rewards(args: Arguments, samples: list[Sample], **kwargs: Any) -> tuple[list[float], list[float]]:
    """0 for every sample, for `--custom-reward-post-process-path`."""
    return [0.0] * len(samples), [0.0] * len(samples)
