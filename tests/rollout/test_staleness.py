"""How old samples are, and which rollouts may go without waiting, against counting by hand."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from slimrl.data.sample import Sample, SampleStatus
from slimrl.rollout.asynchronous.staleness import (
    anew,
    can_train_without_expiring,
    has_unknown_version,
    oldest_version,
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


def test_a_sample_is_as_old_as_its_oldest_token():
    assert oldest_version(sample(("4", 3), ("5", 2), ("11", 1))) == 4
    assert oldest_version(sample(("10", 3), ("9", 1))) == 9  # numbers, not text


def test_the_words_of_a_tool_have_no_age_but_trained_tokens_of_unknown_weights_may_be_as_old_as_the_sample():
    tool = sample(("4", 2), ("", 2), ("5", 1), mask=[1, 1, 0, 0, 1])
    assert oldest_version(tool, otherwise=1) == 4
    unknown = sample(("4", 2), ("", 2), ("5", 1))
    assert oldest_version(unknown, otherwise=1) == 1 and oldest_version(unknown) == 4
    assert oldest_version(sample(("default", 2)), otherwise=3) == 3
    assert oldest_version(Sample("p"), otherwise=3) == 3 and oldest_version(Sample("p")) is None


def test_the_histogram_counts_samples_by_their_age_in_rollouts():
    samples = [sample(("7", 2)), sample(("6", 1), ("7", 9)), sample(("4", 1)), sample(("6", 1)), Sample("p")]
    assert staleness_metrics(7, samples) == {
        "rollout/staleness/mean": (0 + 1 + 3 + 1) / 4,
        "rollout/staleness/max": 3.0,
        "rollout/staleness/count_0": 1.0,
        "rollout/staleness/count_1": 2.0,
        "rollout/staleness/count_3": 1.0,
    }
    assert staleness_metrics(7, [Sample("p")]) == {}


def test_a_sample_begins_anew_from_its_prompt():
    old = sample(("4", 2))
    fresh = anew(old)
    assert fresh == Sample("p", tokens=[0, 0, 0])
    assert anew(fresh) is fresh and old.response_length == 2
    old.metadata = {"level": 3, "turn_starts": [0, 1], "non_generation_time": 0.5, "start_rollout_id": 4}
    assert anew(old).metadata == {"level": 3}  # what is the prompt's own stays
    assert len(old.metadata) == 4


def test_a_sample_is_of_other_weights_where_trained_tokens_are_of_unknown_or_of_later_ones():
    assert not has_unknown_version(sample(("4", 2), ("6", 1)), 6)
    assert has_unknown_version(sample(("4", 2), ("7", 1)), 6)
    assert has_unknown_version(sample(("default", 2)), 6)
    assert has_unknown_version(sample(("4", 2), ("", 1)), 6)
    assert not has_unknown_version(sample(("4", 2), ("", 1), mask=[1, 1, 0]), 6)  # the words of a tool
    short = sample(("4", 2))
    short.tokens, short.response_length, short.loss_mask = [*short.tokens, 9], 3, [1, 1, 1]
    assert has_unknown_version(short, 6)  # its spans do not reach to the end


def test_a_response_that_no_engine_drew_is_of_no_weights():
    brought = Sample("p", tokens=[0, 1, 2], response_length=2, loss_mask=[1, 1], status=SampleStatus.COMPLETED)
    assert not has_unknown_version(brought, 6) and not has_unknown_version(Sample("p"), 6)
    for drawn in ({"status": SampleStatus.ABORTED}, {"weight_versions": ["3"]}, {"metadata": {"start_rollout_id": 3}}):
        assert has_unknown_version(dataclasses.replace(brought, **drawn), 6)


def test_a_rollout_waits_only_for_groups_that_the_batches_until_their_last_rollout_cannot_hold():
    assert can_train_without_expiring(5, [9, 9], [7, 7, 7])  # rollouts 6 and 7 have room for four
    assert not can_train_without_expiring(5, [9, 9], [6, 6, 6])  # rollout 6 has room for two
    assert can_train_without_expiring(5, [9, 9], [6, 6]) and not can_train_without_expiring(5, [9, 9], [5])


def test_a_rollout_does_not_wait_where_its_own_groups_are_as_pressed_as_those_that_it_would_wait_for():
    assert can_train_without_expiring(5, [5], [5])
    assert can_train_without_expiring(5, [5, 6], [6, 6, 6])  # four of the five have to go into the next four places
    assert not can_train_without_expiring(5, [6, 7], [6, 6, 6])


@given(
    batch=st.integers(1, 3),
    bound=st.integers(0, 3),
    rollout=st.integers(0, 3),
    ready=st.lists(st.integers(0, 3), max_size=9),
    waiting=st.lists(st.integers(0, 3), max_size=6),
)
def test_a_rollout_goes_exactly_when_everybody_who_waits_still_finds_a_place(batch, bound, rollout, ready, waiting):
    due = [sorted(rollout + min(last, bound) for last in group) for group in (ready, waiting)]
    chosen, others = due[0][:batch], due[0][batch:]
    if len(chosen) < batch:
        return
    allowed = can_train_without_expiring(rollout, chosen, due[1])
    if fits(rollout + 1, batch, others + due[1]):
        assert allowed  # nothing would be gained by waiting
    elif fits(rollout, batch, due[0] + due[1]):
        assert not allowed  # all could have a place, if those were waited for that have to go first
    if not due[1]:
        assert allowed


def fits(first: int, batch: int, due: list[int]) -> bool:
    """Whether groups can be dealt out to the rollouts from `first` on, none later than it is due: earliest first."""
    return all(first + place // batch <= last for place, last in enumerate(sorted(due)))
