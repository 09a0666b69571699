"""Custom filters: of groups, of waiting groups and of single samples.

--dynamic-sampling-filter-path examples.filters.between
--buffer-filter-path examples.filters.fresh_first
--rollout-sample-filter-path examples.filters.without_repetition
"""

from __future__ import annotations

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.rollout.filter_hub.dynamic_sampling_filters import DynamicFilterOutput
from slimrl.rollout.metrics import START_ROLLOUT_ID, is_repetitive


def between(args: Arguments, samples: list[Sample]) -> DynamicFilterOutput:
    """Keeps prompts that the model solves in more than 0% and at most 80% of its samples."""
    solved = sum(sample.reward_value(args.reward_key) for sample in samples) / len(samples)
    if solved == 0:
        return DynamicFilterOutput(keep=False, reason="too_hard")
    if solved > 0.8:
        return DynamicFilterOutput(keep=False, reason="too_easy")
    return DynamicFilterOutput(keep=True)


def fresh_first(
    args: Arguments, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int
) -> list[list[Sample]]:
    """Continues the most recently started groups: fewer tokens of old weights, but long answers wait longer."""
    buffer.sort(key=lambda group: max(sample.metadata.get(START_ROLLOUT_ID, 0) for sample in group))
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def without_repetition(args: Arguments, groups: list[list[Sample]]) -> None:
    """Excludes answers that end in a loop from training; they still count in their group's mean reward."""
    for sample in (sample for group in groups for sample in group):
        sample.remove_sample = sample.remove_sample or is_repetitive(sample.response)
