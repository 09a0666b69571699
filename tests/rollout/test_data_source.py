"""Prompts come once per epoch in an order that depends only on the seed, and a resumed run continues exactly there."""

import json
import logging
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.dataset.dataset_mixture import training_prompt_format

relaxed = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def prompts_of(groups):
    return [group[0].prompt for group in groups]


@relaxed
@given(draws=st.lists(st.integers(0, 30), min_size=1, max_size=12), shuffle=st.booleans(), seed=st.integers(0, 99))
def test_each_prompt_is_sampled_once_per_epoch_for_any_call_sizes(make_args, tokenizer, draws, shuffle, seed):
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
def test_resumed_source_gives_the_same_next_samples(make_args, tokenizer, before, after, shuffle):
    source = RolloutDataSource(make_args(rollout_shuffle=shuffle), tokenizer)
    sampled = source.get_samples(before)
    source.add_samples(sampled[:2])
    state = json.loads(json.dumps(source.state_dict()))
    expected = source.get_samples(after)
    resumed = RolloutDataSource(make_args(rollout_shuffle=shuffle), tokenizer)
    resumed.load_state_dict(state)
    assert resumed.get_samples(after) == expected
    assert resumed.state_dict() == source.state_dict()


@relaxed
@given(
    calls=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.booleans()), min_size=1, max_size=8),
    mixed=st.booleans(),
)
def test_prefetching_any_number_of_prompts_changes_no_sample_and_no_state(
    make_args, write_rows, tokenizer, calls, mixed
):
    args = mixed_args(make_args, write_rows, rollout_shuffle=True) if mixed else make_args(rollout_shuffle=True)
    plain, ahead = (RolloutDataSource(args, tokenizer) for _ in range(2))
    for sampled, prefetched, returned in calls:
        ahead.prefetch(prefetched)
        assert ahead.state_dict() == plain.state_dict()
        groups, expected = ahead.get_samples(sampled), plain.get_samples(sampled)
        assert groups == expected
        if returned:
            ahead.add_samples(groups[:2])
            plain.add_samples(expected[:2])
    assert ahead.state_dict() == plain.state_dict()


def test_prefetched_prompts_are_not_tokenized_again(make_args, tokenizer):
    source = RolloutDataSource(make_args(), tokenizer)
    dataset = source._prompts._sets[0].rows
    calls, make = [], dataset._make
    dataset._make = lambda rows: (calls.append(list(rows)), make(rows))[1]
    source.prefetch(4)
    source.get_samples(4)  # all
    source.prefetch(4)
    source.get_samples(6)  # two more
    source.prefetch(2)
    source.get_samples(1)  # one less
    assert [rows for rows in calls if rows] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11]]


def test_sampling_does_not_change_an_earlier_state(make_args, tokenizer):
    source = RolloutDataSource(make_args(), tokenizer)
    source.add_samples(source.get_samples(2))
    state = source.state_dict()
    copy = json.loads(json.dumps(state))
    source.get_samples(5)[0][0].metadata["changed"] = True
    assert state == copy


def test_returned_groups_are_sampled_first_oldest_first(make_args, tokenizer):
    source = RolloutDataSource(make_args(), tokenizer)
    groups = source.get_samples(3)
    source.add_samples([groups[2]])
    source.add_samples([groups[0]])
    assert source.get_samples(3) == [groups[2], groups[0], source_group(make_args, tokenizer, 3)]


def source_group(make_args, tokenizer, number):
    return RolloutDataSource(make_args(), tokenizer).get_samples(number + 1)[number]


def test_state_of_other_data_is_rejected(make_args, write_rows, tokenizer):
    state = RolloutDataSource(make_args(), tokenizer).state_dict()
    longer = write_rows([{"prompt": "a", "label": 1}] * 13, "longer.jsonl")
    with pytest.raises(ValueError, match=r"longer.jsonl \(13 rows\) is not the dataset of the checkpoint, .*12"):
        RolloutDataSource(make_args(prompt_data=longer), tokenizer).load_state_dict(state)
    other = write_rows([{"prompt": "a", "label": 1}] * 12, "other.jsonl")
    with pytest.raises(ValueError, match="is not the dataset of the checkpoint"):
        RolloutDataSource(make_args(prompt_data=other), tokenizer).load_state_dict(state)


def test_same_rows_at_another_path_are_the_same_data(make_args, sums, tmp_path, tokenizer):
    state = RolloutDataSource(make_args(), tokenizer).state_dict()
    moved = tmp_path / "moved.jsonl"
    with open(sums) as original:
        moved.write_text(original.read())
    RolloutDataSource(make_args(prompt_data=str(moved)), tokenizer).load_state_dict(state)


def test_state_of_another_order_is_rejected(make_args, tokenizer):
    state = RolloutDataSource(make_args(rollout_shuffle=True, rollout_seed=1), tokenizer).state_dict()
    with pytest.raises(ValueError, match="--rollout-seed is 2 but the checkpoint's epoch was ordered with 1"):
        RolloutDataSource(make_args(rollout_shuffle=True, rollout_seed=2), tokenizer).load_state_dict(state)
    with pytest.raises(ValueError, match="--rollout-shuffle is False"):
        RolloutDataSource(make_args(rollout_seed=1), tokenizer).load_state_dict(state)


def test_state_of_other_columns_is_rejected(make_args, write_rows, tokenizer):
    rows = write_rows([{"prompt": "a", "question": "b", "label": "1"}])
    state = RolloutDataSource(make_args(prompt_data=rows), tokenizer).state_dict()
    with pytest.raises(ValueError, match="--input-key is question but was prompt when the checkpoint was saved"):
        RolloutDataSource(make_args(prompt_data=rows, input_key="question"), tokenizer).load_state_dict(state)


def test_state_of_another_version_is_rejected(make_args, tokenizer):
    source = RolloutDataSource(make_args(), tokenizer)
    with pytest.raises(ValueError, match="has version 99, this slimrl reads 2"):
        source.load_state_dict({**source.state_dict(), "version": 99})


def test_negative_number_of_groups_is_rejected(make_args, tokenizer):
    with pytest.raises(ValueError, match="asked for -1 groups"):
        RolloutDataSource(make_args(), tokenizer).get_samples(-1)


def test_blank_samples_are_returned_without_a_dataset(make_args, tokenizer):
    source = RolloutDataSource(make_args(prompt_data=None, rollout_global_dataset=False), tokenizer)
    groups = source.get_samples(2)
    assert len(source) == 0
    assert [[(s.group_index, s.index, s.prompt, s.tokens) for s in group] for group in groups] == [
        [(0, 0, "", []), (0, 1, "", [])],
        [(1, 2, "", []), (1, 3, "", [])],
    ]
    resumed = RolloutDataSource(make_args(prompt_data=None, rollout_global_dataset=False), tokenizer)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert resumed.get_samples(1)[0][0].index == 4
    with pytest.raises(ValueError, match="--disable-rollout-global-dataset, or vice versa"):
        RolloutDataSource(make_args(), tokenizer).load_state_dict(source.state_dict())


@pytest.fixture
def uneven(write_rows):
    """Ten prompts of which rows 2, 5 and 9 are longer than six bytes."""
    return write_rows([{"prompt": "x" * (7 if i in (2, 5, 9) else 5) + str(i), "label": i} for i in range(10)])


@relaxed
@given(draws=st.lists(st.integers(0, 9), min_size=1, max_size=8), shuffle=st.booleans())
def test_overlong_prompts_are_skipped_and_the_others_come_once_per_epoch(make_args, uneven, tokenizer, draws, shuffle):
    source = RolloutDataSource(
        make_args(prompt_data=uneven, rollout_max_prompt_len=6, rollout_shuffle=shuffle), tokenizer
    )
    labels = [group[0].label for count in draws for group in source.get_samples(count)]
    kept = [0, 1, 3, 4, 6, 7, 8]
    for start in range(0, len(labels), 7):
        epoch = labels[start : start + 7]
        assert len(set(epoch)) == len(epoch) and set(epoch) <= set(kept)
    assert [group[0].index for group in source.get_samples(1)] == [2 * len(labels)]


def test_end_of_an_epoch_logs_the_number_of_overlong_prompts(make_args, uneven, tokenizer, caplog):
    source = RolloutDataSource(make_args(prompt_data=uneven, rollout_max_prompt_len=6), tokenizer)
    with caplog.at_level(logging.WARNING):
        source.get_samples(3)
        assert source.too_long == 1
        assert "skipping prompts longer than 6 tokens" in caplog.text and ":3 has 8" in caplog.text
        source.get_samples(5)
    assert "epoch 0 skipped 3 of 10 prompts, longer than 6 tokens" in caplog.text
    assert (source.epoch, source.too_long) == (1, 0)


def test_epoch_length_counts_only_usable_prompts(make_args, uneven, tokenizer):
    limit = {"prompt_data": uneven, "rollout_max_prompt_len": 6}
    assert len(RolloutDataSource(make_args(**limit, num_epoch=1), tokenizer)) == 7
    assert len(RolloutDataSource(make_args(**limit, num_epoch=1, num_rollout=4), tokenizer)) == 10
    assert len(RolloutDataSource(make_args(prompt_data=uneven, num_epoch=1), tokenizer)) == 10


def test_prompts_beyond_the_engine_context_are_skipped_or_rejected_by_the_flag(make_args, uneven, tokenizer):
    source = RolloutDataSource(make_args(prompt_data=uneven, engine_context_len=7), tokenizer)
    assert [group[0].label for group in source.get_samples(5)] == [0, 1, 3, 4, 6]
    assert source.too_long == 2
    source = RolloutDataSource(make_args(prompt_data=uneven, engine_context_len=7, refuse_long_prompts=True), tokenizer)
    assert len(source.get_samples(2)) == 2
    with pytest.raises(ValueError, match=r":3: the prompt has 8 tokens, more than 6 .*--refuse-long-prompts"):
        source.get_samples(1)


def test_data_without_usable_rows_is_rejected(make_args, uneven, tokenizer):
    source = RolloutDataSource(make_args(prompt_data=uneven, rollout_max_prompt_len=2), tokenizer)
    with pytest.raises(
        ValueError, match="no prompt to train on: 10 of 10 are longer than 2 tokens .--rollout-max-prompt"
    ):
        source.get_samples(1)
    assert source.epoch == 0  # every row was read once


@pytest.mark.parametrize(
    ("custom", "own", "kept"), [(None, False, False), (None, True, True), ("a.b", False, True), ("a.b", True, True)]
)
def test_messages_are_kept_when_a_custom_function_may_need_them(make_args, custom, own, kept):
    given = {"custom_generate_function_path": custom, "rollout_function_path": "a.rollout" if own else None}
    args = make_args(**{name: value for name, value in given.items() if value is not None})
    assert args.has_custom_rollout_function is own
    assert training_prompt_format(args).keep_messages is kept


@relaxed
@given(before=st.integers(0, 20), after=st.integers(1, 20))
def test_resumed_source_skips_the_same_prompts(make_args, uneven, tokenizer, before, after):
    args = make_args(prompt_data=uneven, rollout_max_prompt_len=6, rollout_shuffle=True)
    source, resumed = RolloutDataSource(args, tokenizer), RolloutDataSource(args, tokenizer)
    source.get_samples(before)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert resumed.get_samples(after) == source.get_samples(after)
    assert resumed.state_dict() == source.state_dict()


@pytest.fixture
def broken(tmp_path):
    """Eight rows; lines 2 and 5 cannot be read, line 7 has no label."""
    lines = [json.dumps({"prompt": f"p{i}", "label": i}) for i in range(8)]
    lines[1], lines[4], lines[6] = "{oops", "[1]", '{"prompt": "p6"}'
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def test_too_many_invalid_rows_end_the_run_with_every_file_and_line(make_args, broken, tokenizer):
    for allowed in (0, 2):
        with pytest.raises(ValueError) as caught:
            RolloutDataSource(make_args(prompt_data=broken, max_bad_rows=allowed), tokenizer)
        lines = str(caught.value).splitlines()
        assert lines[0].startswith("3 bad rows in ") and lines[0].endswith("raise --max-bad-rows to skip that many")
        assert [line.strip().split(": ")[0] for line in lines[1:]] == [f"{broken}:{number}" for number in (2, 5, 7)]


def test_allowed_invalid_rows_are_skipped_and_logged(make_args, write_rows, broken, tokenizer, caplog):
    args = make_args(prompt_data=broken, max_bad_rows=3, num_epoch=1)
    with caplog.at_level(logging.WARNING):
        source = RolloutDataSource(args, tokenizer)
    assert [f"{broken}:{number}: " in caplog.text for number in (2, 5, 7)] == [True] * 3
    assert len(source) == 5
    labels = [group[0].label for group in source.get_samples(10)]
    assert labels == [0, 2, 3, 5, 7] * 2
    one = write_rows([{"prompt": "p", "label": 0}, {"prompt": "q"}], "one.jsonl")
    assert len(RolloutDataSource(make_args(prompt_data=one, max_bad_rows=1, num_epoch=1), tokenizer)) == 1
    resumed = RolloutDataSource(args, tokenizer)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert resumed.get_samples(3) == source.get_samples(3)


def test_row_rejected_by_the_chat_template_counts_when_it_is_sampled(make_args, write_rows, tokenizer):
    refusing = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)
    refusing.chat_template = "{% if messages[0]['content'] == 'b' %}{{ raise_exception('no b') }}{% endif %}x"
    path = write_rows([{"prompt": letter, "label": letter} for letter in "abc"])
    source = RolloutDataSource(make_args(prompt_data=path, apply_chat_template=True), refusing)
    source.prefetch(3)  # not yet
    assert source.get_samples(1)[0][0].label == "a"
    assert source.state_dict()["prompts"]["sets"][0]["bad_rows"] == []
    source.prefetch(1)
    with pytest.raises(ValueError, match=r"1 bad row in .*\n.*:2: the chat template rejects it: .*no b"):
        source.get_samples(1)
    source = RolloutDataSource(make_args(prompt_data=path, apply_chat_template=True, max_bad_rows=1), refusing)
    assert [group[0].label for group in source.get_samples(4)] == ["a", "c", "a", "c"]


def mixed_args(make_args, write_rows, **overrides):
    for name, size in (("math", 20), ("code", 5)):
        write_rows([{"prompt": f"{name}{i}", "label": name} for i in range(size)], f"{name}.jsonl")
    folder = write_rows([], "none.jsonl").removesuffix("none.jsonl")
    return make_args(prompt_data=[f"{folder}math.jsonl=0.75", f"{folder}code.jsonl=0.25"], **overrides)


def test_datasets_are_mixed_by_their_probabilities_and_each_keeps_its_epochs(make_args, write_rows, tokenizer):
    source = RolloutDataSource(mixed_args(make_args, write_rows, rollout_shuffle=True, rollout_seed=7), tokenizer)
    samples = [group[0] for group in source.get_samples(4000)]
    share = sum(sample.label == "math" for sample in samples) / 4000
    assert abs(share - 0.75) < 3 * (0.75 * 0.25 / 4000) ** 0.5  # three standard deviations of a binomial
    for name, size in (("math", 20), ("code", 5)):
        prompts = [sample.prompt for sample in samples if sample.label == name]
        for start in range(0, len(prompts) - size, size):
            assert sorted(prompts[start : start + size]) == sorted(f"{name}{i}" for i in range(size))
    assert len(source) == 25
    # the dataset of each prompt depends only on the seed and the prompt's number
    numbers = [random.Random(f"7/{draw}").random() for draw in range(50)]
    assert [sample.label for sample in samples[:50]] == ["math" if number < 0.75 else "code" for number in numbers]


@relaxed
@given(before=st.lists(st.integers(0, 9), max_size=4), after=st.integers(1, 30), seed=st.integers(0, 5))
def test_mixture_is_deterministic_for_any_call_sizes_and_resumes(make_args, write_rows, tokenizer, before, after, seed):
    args = mixed_args(make_args, write_rows, rollout_shuffle=True, rollout_seed=seed)
    expected = RolloutDataSource(args, tokenizer).get_samples(sum(before) + after)
    source = RolloutDataSource(args, tokenizer)
    assert [group for count in before for group in source.get_samples(count)] == expected[: sum(before)]
    resumed = RolloutDataSource(args, tokenizer)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert resumed.get_samples(after) == expected[sum(before) :]


def test_state_of_another_mixture_is_rejected(make_args, write_rows, tokenizer):
    args = mixed_args(make_args, write_rows)
    state = RolloutDataSource(args, tokenizer).state_dict()
    other = mixed_args(make_args, write_rows, rollout_seed=args.rollout_seed + 1)
    with pytest.raises(ValueError, match="--rollout-seed is"):  # unshuffled, but the mixture depends on the seed
        RolloutDataSource(other, tokenizer).load_state_dict(state)
    args.prompt_data = [path.replace("0.75", "0.5").replace("0.25", "0.5") for path in args.prompt_data]
    with pytest.raises(ValueError, match=r"has the probabilities \[0.5, 0.5\] but the checkpoint's, .* \[0.75, 0.25\]"):
        RolloutDataSource(args, tokenizer).load_state_dict(state)


def test_several_paths_without_probabilities_are_one_dataset(make_args, write_rows, tokenizer):
    paths = [write_rows([{"prompt": f"{name}{i}", "label": i} for i in range(3)], f"{name}.jsonl") for name in "ab"]
    source = RolloutDataSource(make_args(prompt_data=[paths[0], f"{paths[1]}@[1:]"]), tokenizer)
    assert prompts_of(source.get_samples(6)) == ["a0", "a1", "a2", "b1", "b2", "a0"]


def test_large_dataset_is_checked_while_it_is_sampled(make_args, write_rows, tokenizer, monkeypatch):
    path = write_rows([{"prompt": "p", "label": 1}] * 30_000 + [{"prompt": "p"}])
    source = RolloutDataSource(make_args(prompt_data=path), tokenizer)  # too many rows to wait for
    with pytest.raises(ValueError, match=r":30001: no column 'label'"):
        source.state_dict()
    with pytest.raises(ValueError, match=r":30001: no column 'label'"):
        source.get_samples(1)
