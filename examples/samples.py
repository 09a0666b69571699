"""Functions that process samples between the engine and training.

--rollout-sample-hook-path examples.samples.note_final_answer
--rollout-all-samples-process-path examples.samples.write_unsolved
--custom-convert-samples-to-train-data-path examples.samples.without_truncated

`custom: {unsolved: unsolved.jsonl}` in --custom-config-path sets the output file of the second.
"""

from __future__ import annotations

import json
from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample, SampleStatus
from slimrl.hooks import DataSource


def note_final_answer(args: Arguments, sample: Sample, *, evaluation: bool) -> None:
    """Stores the last line in the metadata, for the reward function and for dumps."""
    if not evaluation:
        sample.metadata["final_answer"] = (sample.response.strip().splitlines() or [""])[-1].strip()


def write_unsolved(args: Arguments, all_groups: list[list[Sample]], data_source: DataSource) -> None:
    """Appends prompts without a right answer to a file, one per line."""
    with open(args.custom["unsolved"], "a", encoding="utf-8") as file:
        for group in all_groups:
            if all(sample.reward_value(args.reward_key) <= 0 for sample in group):
                file.write(json.dumps({"prompt": group[0].prompt, "label": group[0].label}) + "\n")


def without_truncated(args: Arguments, samples: list[Sample]) -> dict[str, list[Any]]:
    """Trains on rewards minus their group's mean, and not on truncated answers."""
    cut = [sample.status is SampleStatus.TRUNCATED for sample in samples]
    rewards = [sample.reward_value(args.reward_key) for sample in samples]
    groups = [sample.group_index for sample in samples]
    by_group: dict[int | None, list[float]] = {}
    for group, reward in zip(groups, rewards, strict=True):
        by_group.setdefault(group, []).append(reward)
    means = {group: sum(values) / len(values) for group, values in by_group.items()}
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [reward - means[group] for reward, group in zip(rewards, groups, strict=True)],
        "raw_reward": rewards,
        "truncated": cut,
        "loss_masks": [
            [0] * sample.response_length if off else sample.loss_mask or [1] * sample.response_length
            for sample, off in zip(samples, cut, strict=True)
        ],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": groups,
    }
