"""Prompts come once per epoch, in an order that only the seed decides, and a resumed run goes on exactly there."""

import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slimrl.rollout.data_source import RolloutDataSource

relaxed = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def prompts_of(groups):
    return [group[0].prompt for group in groups]


@relaxed
@given(draws=st.lists(st.integers(0, 30), min_size=1, max_size=12), shuffle=st.booleans(), seed=st.integers(0, 99))
def test_each_prompt_comes_exactly_once_per_epoch_however_it_is_drawn(make_args, tokenizer, draws, shuffle, seed):
    source = RolloutDataSource(make_args(rollout_shuffle=shuffle, rollout_seed=seed), tokenizer)
    groups = [group for count in draws for group in source.get_samples(count)]
    prompts = prompts_of(groups)
    for start in range(0, len(prompts), 12):
        epoch = prompts[start : start + 12]
        assert len(set(epoch)) == len(epoch)
        if shuffle:
            order = list(range(12))
            random.Random(seed + start // 12).shuffle(order)
        else:
            order = range(12)
        assert epoch == [f"{i}+{i}=" for i in order][: len(epoch)]
    assert [group[0].group_index for group in groups] == list(range(sum(draws)))
    assert [sample.index for group in groups for sample in group] == list(range(2 * sum(draws)))
    assert source.epoch == sum(draws) // 12


def test_one_call_may_span_several_epochs(make_args, tokenizer):
    source = RolloutDataSource(make_args(rollout_shuffle=True), tokenizer)
    assert len(source) == 12
    prompts = prompts_of(source.get_samples(30))
    assert sorted(prompts[:12]) == sorted(prompts[12:24]) == sorted(f"{i}+{i}=" for i in range(12))
    assert prompts[:12] != prompts[12:24]


@relaxed
@given(before=st.integers(0, 40), after=st.integers(1, 40), shuffle=st.booleans())
def test_a_resumed_source_gives_the_very_same_next_samples(make_args, tokenizer, before, after, shuffle):
    source = RolloutDataSource(make_args(rollout_shuffle=shuffle), tokenizer)
    drawn = source.get_samples(before)
    source.add_samples(drawn[:2])
    state = json.loads(json.dumps(source.state_dict()))
    expected = source.get_samples(after)
    resumed = RolloutDataSource(make_args(rollout_shuffle=shuffle), tokenizer)
    resumed.load_state_dict(state)
    assert resumed.get_samples(after) == expected
    assert resumed.state_dict() == source.state_dict()


def test_taking_a_state_and_drawing_on_leaves_the_state_as_it_was(make_args, tokenizer):
    source = RolloutDataSource(make_args(), tokenizer)
    source.add_samples(source.get_samples(2))
    state = source.state_dict()
    copy = json.loads(json.dumps(state))
    source.get_samples(5)[0][0].metadata["changed"] = True
    assert state == copy


def test_groups_given_back_are_drawn_first_oldest_first(make_args, tokenizer):
    source = RolloutDataSource(make_args(), tokenizer)
    groups = source.get_samples(3)
    source.add_samples([groups[2]])
    source.add_samples([groups[0]])
    assert source.get_samples(3) == [groups[2], groups[0], source_group(make_args, tokenizer, 3)]


def source_group(make_args, tokenizer, number):
    return RolloutDataSource(make_args(), tokenizer).get_samples(number + 1)[number]


def test_a_state_of_other_data_is_refused(make_args, write_rows, tokenizer):
    state = RolloutDataSource(make_args(), tokenizer).state_dict()
    longer = write_rows([{"prompt": "a", "label": 1}] * 13, "longer.jsonl")
    with pytest.raises(ValueError, match=r"longer.jsonl \(13 prompts\) is not the data set of the checkpoint, .*12"):
        RolloutDataSource(make_args(prompt_data=longer), tokenizer).load_state_dict(state)
    other = write_rows([{"prompt": "a", "label": 1}] * 12, "other.jsonl")
    with pytest.raises(ValueError, match="is not the data set of the checkpoint"):
        RolloutDataSource(make_args(prompt_data=other), tokenizer).load_state_dict(state)


def test_the_same_rows_at_another_place_are_the_same_data(make_args, sums, tmp_path, tokenizer):
    state = RolloutDataSource(make_args(), tokenizer).state_dict()
    moved = tmp_path / "moved.jsonl"
    with open(sums) as original:
        moved.write_text(original.read())
    RolloutDataSource(make_args(prompt_data=str(moved)), tokenizer).load_state_dict(state)


def test_a_state_of_another_order_is_refused(make_args, tokenizer):
    state = RolloutDataSource(make_args(rollout_shuffle=True, rollout_seed=1), tokenizer).state_dict()
    with pytest.raises(ValueError, match="--rollout-seed is 2 and the checkpoint's epoch was ordered with 1"):
        RolloutDataSource(make_args(rollout_shuffle=True, rollout_seed=2), tokenizer).load_state_dict(state)
    with pytest.raises(ValueError, match="--rollout-shuffle is False"):
        RolloutDataSource(make_args(rollout_seed=1), tokenizer).load_state_dict(state)


def test_a_state_of_another_version_is_refused(make_args, tokenizer):
    source = RolloutDataSource(make_args(), tokenizer)
    with pytest.raises(ValueError, match="has version 99, this slimrl reads 1"):
        source.load_state_dict({**source.state_dict(), "version": 99})


def test_a_negative_number_of_groups_is_refused(make_args, tokenizer):
    with pytest.raises(ValueError, match="asked for -1 groups"):
        RolloutDataSource(make_args(), tokenizer).get_samples(-1)
