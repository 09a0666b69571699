"""How old a sample is when it is trained on, counted in rollouts between the weights that drew it and those it trains.

Weight versions are numbers of rollouts trained: rollout r trains the weights r, so a token that the weights v drew is
r - v old then, and a sample is as old as its oldest token. Pure; used by continuous generation, which keeps the bound
`--max-weight-staleness`, and for the metrics of every run.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from slimrl.data.sample import NO_VERSION, Sample, SampleStatus, clip_spans
from slimrl.rollout.generation.multi_turn import NON_GENERATION_TIME, TURN_STARTS
from slimrl.rollout.metrics import START_ROLLOUT_ID

_OF_THE_RESPONSE = (START_ROLLOUT_ID, NON_GENERATION_TIME, TURN_STARTS)


def oldest_version(sample: Sample, otherwise: int | None = None) -> int | None:
    """The oldest weights that drew a token of the sample.

    Where it is not known of all tokens that are trained on, `otherwise` counts too; None where nothing is known.
    """
    known = []
    place = 0
    for version, count in sample.version_spans:
        if version.isdecimal():
            known.append(int(version))
        elif otherwise is not None and (version != NO_VERSION or _is_trained(sample, place, place + count)):
            known.append(otherwise)
        place += count
    if not known and otherwise is not None:
        return otherwise
    return min(known, default=None)


def has_unknown_version(sample: Sample, version: int) -> bool:
    """Whether a sample to be generated has tokens that no bound can be kept for, where the engines hold `version` now.

    These are tokens to be trained on that unknown weights drew (in a checkpoint of an older slimrl, say), and tokens of
    weights that are yet to come (`--start-rollout-id` before the checkpoint's). A response that the data source brings
    with it, and no engine drew, is none.
    """
    drawn = sample.version_spans or sample.weight_versions or START_ROLLOUT_ID in sample.metadata
    if not sample.response_length or not (drawn or sample.status is SampleStatus.ABORTED):
        return False
    place = 0
    for drawn_by, count in clip_spans(sample.version_spans, sample.response_length):
        if int(drawn_by) > version if drawn_by.isdecimal() else _is_trained(sample, place, place + count):
            return True
        place += count
    return False


def staleness_metrics(rollout_id: int, samples: Iterable[Sample]) -> dict[str, float]:
    """Mean and largest staleness of the samples of a rollout, and how many have each; {} where no version is known."""
    oldest = [oldest_version(sample) for sample in samples]
    ages = [rollout_id - version for version in oldest if version is not None]
    if not ages:
        return {}
    counts = {f"rollout/staleness/count_{age}": float(count) for age, count in sorted(Counter(ages).items())}
    return {"rollout/staleness/mean": sum(ages) / len(ages), "rollout/staleness/max": float(max(ages)), **counts}


def anew(sample: Sample) -> Sample:
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
        weight_versions=[],
        version_spans=[],
        reward=None,
        status=SampleStatus.PENDING,
        remove_sample=False,
        metadata={key: value for key, value in sample.metadata.items() if key not in _OF_THE_RESPONSE},
    )


def can_train_without_expiring(rollout_id: int, chosen: Sequence[int], waiting: Sequence[int]) -> bool:
    """Whether rollout `rollout_id` may be the groups `chosen` now, so that no group that waits becomes too old.

    All are last rollouts: the last one that a group is young enough for. `chosen` are the earliest of the finished
    groups, a full batch, `waiting` those in flight. Of these, the ones that must be trained by rollout d have to fit
    into the batches of the rollouts after this one up to d. Where they do not, they are waited for, unless all that are
    chosen have to be trained by d as well: then waiting helps nobody.
    """
    return not any(
        sum(due <= last for due in chosen) < len(chosen)
        and sum(due <= last for due in waiting) > max(last - rollout_id, 0) * len(chosen)
        for last in set(waiting)
    )


def _is_trained(sample: Sample, begin: int, end: int) -> bool:
    return sample.loss_mask is None or any(sample.loss_mask[begin:end])
