"""Rows of preference data become groups of two samples; a row that is no pair is rejected by name."""

from __future__ import annotations

import pytest

from slimrl.data.preference_pairs import PAIR_KEY, AnswerColumns, PairColumns, pair_of
from slimrl.data.prompt_format import PLACE_KEY
from slimrl.data.sample import SampleStatus
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.preference_rollout import generate_rollout, held_out_pairs

QUESTION = {"role": "user", "content": "1+1"}
RIGHT, WRONG = {"role": "assistant", "content": "two"}, {"role": "assistant", "content": "three"}
EARLIER = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.fixture
def source_of(make_args, write_rows, tokenizer):
    """The flags and the data source of one rollout over rows of pairs."""

    def open_rows(rows, **overrides):
        values = {
            "prompt_data": write_rows(rows),
            "input_key": "prompt",
            "label_key": None,
            "rm_type": None,
            "rollout_function_path": "slimrl.rollout.preference_rollout.generate_rollout",
            "loss_type": "preference_loss",
            "rollout_batch_size": len(rows),
            "n_samples_per_prompt": 2,
        }
        args = make_args(**{**values, **overrides})
        return args, RolloutDataSource(args, tokenizer)

    return open_rows


@pytest.fixture
def groups_of(source_of, tokenizer):
    """The groups of one rollout over rows of pairs."""

    def run(rows, **overrides):
        args, source = source_of(rows, **overrides)
        return generate_rollout(args, 0, source, tokenizer=tokenizer).groups

    return run


def parts(tokenizer, sample) -> tuple[str, str]:
    """The text before the first trained token, and that of the trained tokens."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    trained = [token for token, chosen in zip(response, sample.loss_mask, strict=True) if chosen]
    return tokenizer.decode(sample.tokens[: sample.prompt_length]), tokenizer.decode(trained)


LAYOUTS = {
    "prompt of messages, answers as text": {"prompt": [*EARLIER, QUESTION], "chosen": "two", "rejected": "three"},
    "prompt and answers of messages": {"prompt": [*EARLIER, QUESTION], "chosen": [RIGHT], "rejected": [WRONG]},
    "answers of one message": {"prompt": [*EARLIER, QUESTION], "chosen": RIGHT, "rejected": WRONG},
    "whole conversations": {"chosen": [*EARLIER, QUESTION, RIGHT], "rejected": [*EARLIER, QUESTION, WRONG]},
    "whole conversations beside their prompt": {
        "prompt": "1+1",
        "chosen": [*EARLIER, QUESTION, RIGHT],
        "rejected": [*EARLIER, QUESTION, WRONG],
    },
}


@pytest.mark.parametrize("row", LAYOUTS.values(), ids=LAYOUTS)
def test_answers_are_trained_after_the_same_prompt(groups_of, tokenizer, row):
    ((better, worse),) = groups_of([row])
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\n1+1<|im_end|>\n"
    assert parts(tokenizer, better) == (f"{prompt}<|im_start|>assistant\n", "two<|im_end|>")
    assert parts(tokenizer, worse) == (f"{prompt}<|im_start|>assistant\n", "three<|im_end|>")
    assert better.group_index == worse.group_index and (better.reward, worse.reward) == (1.0, 0.0)
    assert [sample.metadata["preference"] for sample in (better, worse)] == ["chosen", "rejected"]
    assert not {PAIR_KEY, PLACE_KEY} & {*better.metadata, *worse.metadata}


def test_conversation_tokens_are_those_of_the_template_applied_once(groups_of, tokenizer):
    ((better, _),) = groups_of([LAYOUTS["prompt and answers of messages"]])
    rendered = tokenizer.apply_chat_template([*EARLIER, QUESTION, RIGHT], tokenize=False)
    assert better.tokens == tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_every_turn_of_an_answer_is_trained_on(groups_of, tokenizer):
    again = [{"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]
    ((better, _),) = groups_of([{"chosen": [QUESTION, RIGHT, *again], "rejected": [QUESTION, WRONG]}])
    assert parts(tokenizer, better)[1] == "two<|im_end|>yes<|im_end|>"


def test_plain_text_is_tokenized_as_prompt_and_answer_with_the_end_token(groups_of, tokenizer):
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3<|im_end|>"}
    ((better, worse),) = groups_of([row])
    assert parts(tokenizer, better) == ("1+1=", "2<|im_end|>")
    assert parts(tokenizer, worse) == ("1+1=", "3<|im_end|>")
    ((chat, _),) = groups_of([row], apply_chat_template=True)
    assert parts(tokenizer, chat) == ("<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n", "2<|im_end|>")


def test_other_columns_hold_the_answers(groups_of, tokenizer):
    row = {"question": "q", "better": "a", "worse": "b"}
    ((better, _),) = groups_of([row], input_key="question", chosen_key="better", rejected_key="worse")
    assert parts(tokenizer, better) == ("q", "a<|im_end|>")


def test_pair_of_another_source_without_a_margin_has_the_margin_zero(source_of, tokenizer):
    args, source = source_of([LAYOUTS["prompt and answers of messages"]], loss_type="reward_model_loss")

    class WithoutMargins:
        def get_samples(self, count):
            groups = source.get_samples(count)
            assert [sample.metadata[PAIR_KEY].pop("margin") for group in groups for sample in group] == [0.0, 0.0]
            return groups

    ((better, worse),) = generate_rollout(args, 0, WithoutMargins(), tokenizer=tokenizer).groups
    assert (better.reward, worse.reward) == (0.0, 0.0)


def test_prompt_that_the_template_renders_differently_is_rejected(source_of, tokenizer):
    args, source = source_of([{"prompt": [QUESTION], "chosen": [RIGHT], "rejected": [WRONG]}])

    class LaterTurnsChangeEarlierOnes:
        def apply_chat_template(self, messages, **options):
            text = tokenizer.apply_chat_template(messages, **options)
            return text.replace("1+1", "1 + 1") if "three" in text else text

        def __call__(self, *texts, **options):
            return tokenizer(*texts, **options)

    with pytest.raises(ValueError, match=r"train.jsonl:1: the chat template renders its prompt differently"):
        generate_rollout(args, 0, source, tokenizer=LaterTurnsChangeEarlierOnes())


def test_group_of_another_size_is_rejected(groups_of):
    with pytest.raises(ValueError, match="'rejected' has 1 rejected answer and --n-samples-per-prompt 3 needs a"):
        groups_of([{"prompt": "q", "chosen": "a", "rejected": "b"}], n_samples_per_prompt=3)


def test_several_rejected_answers_follow_the_preferred_one(groups_of, tokenizer):
    row = {"prompt": [*EARLIER, QUESTION], "chosen": "two", "rejected": ["three", "four"]}
    (group,) = groups_of([row], n_samples_per_prompt=3)
    assert [parts(tokenizer, sample)[1] for sample in group] == ["two<|im_end|>", "three<|im_end|>", "four<|im_end|>"]
    assert [sample.reward for sample in group] == [1.0, 0.0, 0.0]


LABELLED = {
    "texts": {"prompt": "1+1=", "completion": "2", "label": True},
    "messages": {"prompt": [*EARLIER, QUESTION], "completion": [RIGHT], "label": False},
    "text after messages": {"prompt": [QUESTION], "completion": "two", "label": True},
    "one message": {"prompt": [QUESTION], "completion": WRONG, "label": False},
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("texts", ("1+1=", "2<|im_end|>", 1.0)),
        (
            "messages",
            (
                "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\n1+1<|im_end|>"
                "\n<|im_start|>assistant\n",
                "two<|im_end|>",
                0.0,
            ),
        ),
        ("text after messages", ("<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n", "two<|im_end|>", 1.0)),
        ("one message", ("<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n", "three<|im_end|>", 0.0)),
    ],
)
def test_labelled_answer_is_a_sample_with_its_label_as_reward(groups_of, tokenizer, name, expected):
    labelled = {"n_samples_per_prompt": 1, "preference_loss": "kto"}
    ((sample,),) = groups_of([LABELLED[name]], **labelled)
    assert (*parts(tokenizer, sample), sample.reward) == expected
    assert sample.metadata["preference"] == ("chosen" if sample.reward else "rejected")


def test_pairs_are_split_into_a_desirable_and_an_undesirable_answer(groups_of, tokenizer):
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    (group,) = groups_of([row], preference_loss="kto")
    assert [(*parts(tokenizer, sample), sample.reward) for sample in group] == [
        ("1+1=", "2<|im_end|>", 1.0),
        ("1+1=", "3<|im_end|>", 0.0),
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q", "completion": "a"}, "no column 'label' (--label-key); it has ['completion', 'prompt']"),
        ({"prompt": "q", "completion": "a", "label": 1}, "'label' (--label-key) is 1 and must be true (desirable) or"),
        ({"prompt": "q", "completion": "a", "label": "true"}, "'label' (--label-key) is 'true' and must be true"),
        ({"prompt": "q", "completion": "a", "label": None}, "'label' (--label-key) is None and must be true"),
        ({"prompt": "q", "completion": " ", "label": True}, "an empty column 'completion' (--completion-key)"),
        ({"prompt": "q", "label": True}, "no column 'completion' (--completion-key)"),
        ({"prompt": "", "completion": "a", "label": True}, "an empty column 'prompt' (--input-key) for the prompt"),
        ({"prompt": "q", "completion": 3, "label": True}, "'completion' must be text or a list of"),
        ({"prompt": [QUESTION], "completion": [QUESTION, RIGHT], "label": True}, "'completion' does not begin with"),
        ({"prompt": [QUESTION], "completion": [RIGHT, QUESTION], "label": True}, "'completion' does not end with"),
        ({"prompt": [QUESTION, RIGHT], "completion": "a", "label": True}, "the prompt ends with a message of the"),
    ],
)
def test_row_without_a_labelled_answer_is_rejected_with_the_reason(row, reason):
    with pytest.raises(ValueError) as caught:
        pair_of(row, "prompt", AnswerColumns("completion", "label", as_chat=False))
    assert str(caught.value).startswith(reason)


def test_labelled_answers_of_another_source_are_checked(source_of, tokenizer):
    args, source = source_of([LABELLED["texts"]], n_samples_per_prompt=1, preference_loss="kto")
    pairs_instead = type("Pairs", (), {"get_samples": lambda self, count: with_pair(source.get_samples(count))})()

    def with_pair(groups):
        groups[0][0].metadata[PAIR_KEY] = {"chosen": "a", "rejected": "b"}
        return groups

    with pytest.raises(ValueError, match=r"train.jsonl:1: it has no 'completion' with a 'label', and --n-samples"):
        generate_rollout(args, 0, pairs_instead, tokenizer=tokenizer)


COLUMNS = PairColumns("chosen", "rejected", as_chat=False)
BAD = [
    ({"prompt": "q", "chosen": "a"}, "no column 'rejected' (--rejected-key); it has ['chosen', 'prompt']"),
    ({"prompt": "q", "chosen": " ", "rejected": "b"}, "an empty column 'chosen' (--chosen-key)"),
    ({"prompt": "q", "chosen": "a", "rejected": []}, "an empty column 'rejected' (--rejected-key)"),
    ({"prompt": "q", "chosen": "a", "rejected": "a"}, "'chosen' and 'rejected' are equal"),
    ({"chosen": "a", "rejected": "b"}, "no column 'prompt' (--input-key) for the prompt"),
    ({"prompt": "", "chosen": "a", "rejected": "b"}, "an empty column 'prompt' (--input-key) for the prompt"),
    ({"prompt": "q", "chosen": 1, "rejected": 2}, "'chosen' must be text or a list of"),
    ({"prompt": "q", "chosen": [QUESTION, 3], "rejected": "b"}, "'chosen' must be text or a list of"),
    ({"prompt": [QUESTION, RIGHT], "chosen": "a", "rejected": "b"}, "the prompt ends with a message of the assistant"),
    (
        {"prompt": [QUESTION], "chosen": [RIGHT], "rejected": [QUESTION, WRONG]},
        "the prompts of 'chosen' and 'rejected' differ",
    ),
    ({"prompt": [RIGHT], "chosen": "a", "rejected": "b"}, "the prompt ends with a message of the assistant"),
    (
        {"chosen": [QUESTION, RIGHT], "rejected": [{"role": "user", "content": "1 + 1"}, WRONG]},
        "the prompts of 'chosen' and 'rejected' differ",
    ),
    ({"chosen": [*EARLIER, QUESTION, RIGHT], "rejected": EARLIER}, "the prompts of 'chosen' and 'rejected' differ"),
    (
        {"prompt": "another", "chosen": [QUESTION, RIGHT], "rejected": [QUESTION, WRONG]},
        "the prompt differs: column 'prompt' is not the beginning of the conversations",
    ),
    (
        {"prompt": [QUESTION], "chosen": [RIGHT, QUESTION], "rejected": [WRONG]},
        "'chosen' does not end with a message of the assistant that has content",
    ),
    (
        {"prompt": [QUESTION], "chosen": [RIGHT], "rejected": [{"role": "assistant", "content": " "}]},
        "'rejected' does not end with a message of the assistant that has content",
    ),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_row_that_is_no_pair_is_rejected_with_the_reason(row, reason):
    with pytest.raises(ValueError) as caught:
        pair_of(row, "prompt", COLUMNS)
    assert str(caught.value).startswith(reason)


def test_bad_row_is_named_with_its_line(groups_of):
    good = {"prompt": "q", "chosen": "a", "rejected": "b"}
    with pytest.raises(ValueError, match=r"train.jsonl:2: 'chosen' and 'rejected' are equal"):
        groups_of([good, {**good, "chosen": "b"}])


def test_resumed_run_needs_the_same_answer_columns(source_of):
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b", "other": "c"}]
    state = source_of(rows)[1].state_dict()
    source_of(rows)[1].load_state_dict(state)
    with pytest.raises(ValueError, match="--rejected-key is other but was rejected"):
        source_of(rows, rejected_key="other")[1].load_state_dict(state)


def test_both_answers_from_one_column_are_rejected_by_flag():
    with pytest.raises(ValueError, match="--chosen-key and --rejected-key are both 'chosen': name the columns"):
        pair_of({"prompt": "q", "chosen": "a"}, "prompt", PairColumns("chosen", "chosen", as_chat=False))


@pytest.mark.parametrize(
    "row", [LAYOUTS["prompt and answers of messages"], {"prompt": "1+1=", "chosen": "2 yes", "rejected": "3 no"}]
)
def test_longer_answers_are_cut_at_their_end(groups_of, row):
    (whole,) = groups_of([row])
    limit = len(whole[1].tokens) - 1
    (cut,) = groups_of([row], rollout_max_context_len=limit)
    for before, after in zip(whole, cut, strict=True):
        assert after.tokens == before.tokens[:limit] and len(after.loss_mask) == after.response_length
        assert (after.status is SampleStatus.TRUNCATED) == (len(before.tokens) > limit)
    prompt = whole[0].prompt_length
    with pytest.raises(ValueError, match=f"--rollout-max-context-len {prompt} cuts off the rest"):
        groups_of([row], rollout_max_context_len=prompt)


TOO_LATE = {"prompt": "1+1=", "chosen": "the same words, then yes", "rejected": "the same words, then no"}
CUT, KTO = {"rollout_max_context_len": 4}, {"n_samples_per_prompt": 1, "preference_loss": "kto"}


@pytest.mark.parametrize(
    ("row", "flags", "reason"),
    [
        (TOO_LATE, {"rollout_max_context_len": 9}, ": two of its answers have the same tokens (of the first 9,"),
        (
            {**TOO_LATE, "chosen": "2", "rejected": "2<|im_end|>"},
            {},
            ": two of its answers have the same tokens: remove",
        ),
        (TOO_LATE, CUT, " has 4 tokens before the first one to train on, and --rollout-max-context-len 4 cuts off the"),
        (LAYOUTS["whole conversations"], CUT, ", sample 2 has"),
        ({"prompt": "1+1=", "completion": "2", "label": True}, {**KTO, **CUT}, " has 4 tokens before the first one"),
        (LABELLED["messages"], {**KTO, **CUT}, ", sample 1 has"),
    ],
)
def test_row_of_which_the_tokens_leave_nothing_to_train_is_named_with_its_line(
    source_of, make_eval_dataset, tokenizer, row, flags, reason
):
    labelled = {"prompt": "q", "completion": "a", "label": True}
    good = labelled if "completion" in row else {"prompt": "q", "chosen": "a", "rejected": "b"}
    args, source = source_of([good, row], debug_train_only=True, **flags)
    with pytest.raises(ValueError) as caught:
        generate_rollout(args, 0, source, tokenizer=tokenizer)
    assert str(caught.value).startswith("--prompt-data, ") and f"train.jsonl:2{reason}" in str(caught.value)
    held_out = make_eval_dataset(
        name="rest",
        path=args.prompt_data,
        input_key="prompt",
        label_key="label" if flags.get("preference_loss") else None,
        max_context_len=args.rollout_max_context_len,
        apply_chat_template=False,
        apply_chat_template_kwargs={},
    )
    with pytest.raises(ValueError) as caught:
        held_out_pairs(args, held_out, tokenizer)
    assert str(caught.value).startswith("evaluation set rest, ") and f"train.jsonl:2{reason}" in str(caught.value)
