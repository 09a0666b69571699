"""Staleness of samples, and which rollouts may start without waiting, against brute force."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from slimrl.data.sample import Sample, SampleStatus
from slimrl.rollout.async_rollout import (
    can_train_without_expiring,
    has_unknown_version,
    oldest_version,
    reset_to_prompt,
    staleness_metrics,
)


def sample(*spans, mask=None) -> Sample:
    length = sum(count for _, count in spans)
    return Sample(
        "p",
        tokens=[0] * (3 + length),
        response="text",
        response_length=length,
        loss_mask=mask or [1] * length,
        rollout_log_probs=[-1.0] * length,
        version_spans=[list(span) for span in spans],
        reward=1.0,
        status=SampleStatus.COMPLETED,
    )


def test_sample_staleness_is_that_of_its_oldest_token():
    assert oldest_version(sample(("4", 3), ("5", 2), ("11", 1))) == 4
    assert oldest_version(sample(("10", 3), ("9", 1))) == 9  # numbers, not text


def test_tool_tokens_have_no_staleness_but_trained_tokens_of_unknown_version_do():
    tool = sample(("4", 2), ("", 2), ("5", 1), mask=[1, 1, 0, 0, 1])
    assert oldest_version(tool, otherwise=1) == 4
    unknown = sample(("4", 2), ("", 2), ("5", 1))
    assert oldest_version(unknown, otherwise=1) == 1 and oldest_version(unknown) == 4
    assert oldest_version(sample(("default", 2)), otherwise=3) == 3
    assert oldest_version(Sample("p"), otherwise=3) == 3 and oldest_version(Sample("p")) is None


def test_histogram_counts_samples_by_staleness_in_rollouts():
    samples = [sample(("7", 2)), sample(("6", 1), ("7", 9)), sample(("4", 1)), sample(("6", 1)), Sample("p")]
    assert staleness_metrics(7, samples) == {
        "rollout/staleness/mean": (0 + 1 + 3 + 1) / 4,
        "rollout/staleness/max": 3.0,
        "rollout/staleness/count_0": 1.0,
        "rollout/staleness/count_1": 2.0,
        "rollout/staleness/count_3": 1.0,
    }
    assert staleness_metrics(7, [Sample("p")]) == {}


def test_sample_is_reset_to_its_prompt():
    old = sample(("4", 2))
    old.teacher_log_probs = [-1.0, -2.0]
    fresh = reset_to_prompt(old)
    assert fresh == Sample("p", tokens=[0, 0, 0])
    assert reset_to_prompt(fresh) is fresh and old.response_length == 2
    old.metadata = {"level": 3, "turn_starts": [0, 1], "non_generation_time": 0.5, "start_rollout_id": 4}
    assert reset_to_prompt(old).metadata == {"level": 3}  # the prompt's own data stays
    assert len(old.metadata) == 4


def test_sample_with_unknown_or_later_weights_has_an_unknown_version():
    assert not has_unknown_version(sample(("4", 2), ("6", 1)), 6)
    assert has_unknown_version(sample(("4", 2), ("7", 1)), 6)
    assert has_unknown_version(sample(("default", 2)), 6)
    assert has_unknown_version(sample(("4", 2), ("", 1)), 6)
    assert not has_unknown_version(sample(("4", 2), ("", 1), mask=[1, 1, 0]), 6)  # tool output
    short = sample(("4", 2))
    short.tokens, short.response_length, short.loss_mask = [*short.tokens, 9], 3, [1, 1, 1]
    assert has_unknown_version(short, 6)  # its spans do not cover the end


def test_response_not_sampled_by_an_engine_needs_no_version():
    brought = Sample("p", tokens=[0, 1, 2], response_length=2, loss_mask=[1, 1], status=SampleStatus.COMPLETED)
    assert not has_unknown_version(brought, 6) and not has_unknown_version(Sample("p"), 6)
    for sampled in (
        {"status": SampleStatus.ABORTED},
        {"weight_versions": ["3"]},
        {"metadata": {"start_rollout_id": 3}},
    ):
        assert has_unknown_version(dataclasses.replace(brought, **sampled), 6)


def test_rollout_waits_only_for_groups_that_later_batches_cannot_hold():
    assert can_train_without_expiring(5, [9, 9], [7, 7, 7])  # rollouts 6 and 7 have capacity for four
    assert not can_train_without_expiring(5, [9, 9], [6, 6, 6])  # rollout 6 has capacity for two
    assert can_train_without_expiring(5, [9, 9], [6, 6]) and not can_train_without_expiring(5, [9, 9], [5])


def test_rollout_does_not_wait_when_its_own_groups_expire_as_soon():
    assert can_train_without_expiring(5, [5], [5])
    assert can_train_without_expiring(5, [5, 6], [6, 6, 6])  # four of the five must be in the next four places
    assert not can_train_without_expiring(5, [6, 7], [6, 6, 6])


@given(
    batch=st.integers(1, 3),
    bound=st.integers(0, 3),
    rollout=st.integers(0, 3),
    ready=st.lists(st.integers(0, 3), max_size=9),
    waiting=st.lists(st.integers(0, 3), max_size=6),
)
def test_rollout_starts_exactly_when_every_waiting_group_still_fits(batch, bound, rollout, ready, waiting):
    due = [sorted(rollout + min(last, bound) for last in group) for group in (ready, waiting)]
    chosen, others = due[0][:batch], due[0][batch:]
    if len(chosen) < batch:
        return
    allowed = can_train_without_expiring(rollout, chosen, due[1])
    if fits(rollout + 1, batch, others + due[1]):
        assert allowed  # waiting would gain nothing
    elif fits(rollout, batch, due[0] + due[1]):
        assert not allowed  # all could fit, if the rollout waited for the groups that are due first
    if not due[1]:
        assert allowed


def fits(first: int, batch: int, due: list[int]) -> bool:
    """Whether groups can be assigned to the rollouts from `first` on before each is due: earliest first."""
    return all(first + place // batch <= last for place, last in enumerate(sorted(due)))
