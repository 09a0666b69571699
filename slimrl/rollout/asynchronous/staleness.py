"""Staleness of a sample: the number of rollouts between the weights that sampled it and the weights that it trains.

A weight version is the number of rollouts trained: rollout r trains the weights r. A token sampled by the weights v has
staleness r - v, and a sample has the staleness of its oldest token. Fully asynchronous generation enforces the bound
`--max-weight-staleness`; every run reports the metrics. Pure functions.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import overload

from slimrl.data.sample import NO_VERSION, Sample, SampleStatus, clip_spans
from slimrl.rollout.generation.multi_turn import NON_GENERATION_TIME, TURN_STARTS
from slimrl.rollout.metrics import START_ROLLOUT_ID

_RESPONSE_METADATA = (START_ROLLOUT_ID, NON_GENERATION_TIME, TURN_STARTS)


@overload
def oldest_version(sample: Sample, otherwise: int) -> int: ...


@overload
def oldest_version(sample: Sample, otherwise: None = None) -> int | None: ...


def oldest_version(sample: Sample, otherwise: int | None = None) -> int | None:
    """The oldest weight version that sampled a token of the sample; None if no version is known.

    `otherwise` counts as the version of trained tokens whose version is unknown.
    """
    known = []
    start = 0
    for version, count in sample.version_spans:
        if version.isdecimal():
            known.append(int(version))
        elif otherwise is not None and (version != NO_VERSION or _is_trained(sample, start, start + count)):
            known.append(otherwise)
        start += count
    if not known and otherwise is not None:
        return otherwise
    return min(known, default=None)


def has_unknown_version(sample: Sample, version: int) -> bool:
    """Whether an unfinished sample has tokens of unknown staleness; the engines have the weights `version`.

    These are trained tokens of an unknown weight version (from a checkpoint of an older slimrl, say), and tokens of a
    future version (`--start-rollout-id` before the checkpoint's). A response that comes from the data source, not from
    an engine, does not count.
    """
    sampled = sample.version_spans or sample.weight_versions or START_ROLLOUT_ID in sample.metadata
    if not sample.response_length or not (sampled or sample.status is SampleStatus.ABORTED):
        return False
    start = 0
    for span_version, count in clip_spans(sample.version_spans, sample.response_length):
        if int(span_version) > version if span_version.isdecimal() else _is_trained(sample, start, start + count):
            return True
        start += count
    return False


def staleness_metrics(rollout_id: int, samples: Iterable[Sample]) -> dict[str, float]:
    """Mean, maximum and histogram of the staleness of a rollout's samples; {} if no version is known."""
    oldest = [oldest_version(sample) for sample in samples]
    staleness = [rollout_id - version for version in oldest if version is not None]
    if not staleness:
        return {}
    counts = {f"rollout/staleness/count_{value}": float(count) for value, count in sorted(Counter(staleness).items())}
    return {
        "rollout/staleness/mean": sum(staleness) / len(staleness),
        "rollout/staleness/max": float(max(staleness)),
        **counts,
    }


def reset_to_prompt(sample: Sample) -> Sample:
    """The sample as its prompt alone, to be regenerated."""
    if sample.status is SampleStatus.PENDING and sample.response_length == 0:
        return sample
    return dataclasses.replace(
        sample,
        tokens=sample.tokens[: sample.prompt_length],
        response="",
        response_length=0,
        loss_mask=None,
        rollout_log_probs=None,
        teacher_log_probs=None,
        token_rewards=None,
        teacher_top_ids=None,
        teacher_top_log_probs=None,
        weight_versions=[],
        version_spans=[],
        reward=None,
        status=SampleStatus.PENDING,
        remove_sample=False,
        metadata={key: value for key, value in sample.metadata.items() if key not in _RESPONSE_METADATA},
    )


def can_train_without_expiring(rollout_id: int, chosen: Sequence[int], waiting: Sequence[int]) -> bool:
    """Whether rollout `rollout_id` can train the groups `chosen` now without letting a group in flight expire.

    Groups are given by their deadline: the last rollout that may train them. `chosen` is a full batch of the finished
    groups with the earliest deadlines, `waiting` the groups in flight. Waiting groups with deadline d or earlier must
    fit into the batches of the rollouts after this one up to d. If they do not, the rollout waits for them, unless all
    chosen groups have deadline d or earlier too: then waiting does not help.
    """
    return not any(
        sum(due <= last for due in chosen) < len(chosen)
        and sum(due <= last for due in waiting) > max(last - rollout_id, 0) * len(chosen)
        for last in set(waiting)
    )


def _is_trained(sample: Sample, begin: int, end: int) -> bool:
    return sample.loss_mask is None or any(sample.loss_mask[begin:end])
