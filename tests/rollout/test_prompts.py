"""Rows become prompts exactly as the tokenizer itself renders them, or are reported as invalid."""

import logging

import pyarrow.parquet
import pytest

from slimrl.data.prompt_format import MESSAGES_KEY, truncated
from slimrl.rollout.dataset.prompt_dataset import PromptDataset, PromptFormat, load_prompts

FORMAT = {
    "input_key": "prompt",
    "label_key": "label",
    "metadata_key": "metadata",
    "tool_key": "tools",
    "apply_chat_template": True,
    "chat_template_kwargs": {},
    "max_prompt_len": None,
    "keep_messages": False,
}
CONVERSATION = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1= é"}]


def prompt_format(**overrides):
    return PromptFormat(**{**FORMAT, **overrides})


def test_messages_are_tokenized_with_the_tokenizers_chat_template(write_rows, tokenizer):
    path = write_rows([{"prompt": CONVERSATION, "label": "2"}])
    (prompt,) = load_prompts(path, prompt_format(), tokenizer).prompts
    expected = tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True, return_dict=False)
    assert prompt.token_ids.tolist() == expected
    assert prompt.content == tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True, tokenize=False)


def test_tools_and_template_kwargs_reach_the_template(write_rows, tokenizer):
    tools = [{"type": "function", "function": {"name": "f"}}]
    path = write_rows(
        [{"prompt": CONVERSATION, "label": 2, "tools": tools}, {"prompt": "a", "label": 2, "tools": "[]"}]
    )
    prompts = load_prompts(path, prompt_format(chat_template_kwargs={"quiet": True}), tokenizer).prompts
    expected = tokenizer.apply_chat_template(
        CONVERSATION, tools=tools, add_generation_prompt=True, return_dict=False, quiet=True
    )
    assert prompts[0].token_ids.tolist() == expected
    assert "[1 tools]" in prompts[0].content and "tools]" not in prompts[1].content
    assert prompts[1].content.endswith("<think></think>")
    assert [prompt.metadata for prompt in prompts] == [{"tools": tools}, {}]  # where user code expects them


def test_plain_string_with_a_chat_template_is_one_user_message(write_rows, tokenizer):
    path = write_rows([{"prompt": "1+1=", "label": "2"}])
    (prompt,) = load_prompts(path, prompt_format(), tokenizer).prompts
    assert prompt.content == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"


def test_text_is_tokenized_unchanged_without_a_chat_template(write_rows, tokenizer):
    path = write_rows([{"prompt": "1+1=", "label": "2"}])
    (prompt,) = load_prompts(path, prompt_format(apply_chat_template=False), tokenizer).prompts
    assert prompt.content == "1+1="
    assert prompt.token_ids.tolist() == tokenizer("1+1=", add_special_tokens=False)["input_ids"]


def test_overlong_prompts_are_skipped_and_counted(write_rows, tokenizer, caplog):
    path = write_rows([{"prompt": "x" * n, "label": n} for n in (3, 5, 4, 9, 5)])
    with caplog.at_level(logging.WARNING):
        kept = load_prompts(path, prompt_format(apply_chat_template=False, max_prompt_len=4), tokenizer)
    assert [prompt.label for prompt in kept.prompts] == [3, 4]
    assert kept.too_long == 3
    assert "skipped 3 of 5 prompts, longer than 4 tokens" in caplog.text


def test_text_in_a_template_keeps_braces_and_the_original_for_the_reward_model(write_rows, tokenizer):
    path = write_rows([{"prompt": "{1}+{}=", "label": "2"}])
    form = prompt_format(apply_chat_template=False, input_template="Q: {}\nA {x}:", keep_conversation=True)
    (prompt,) = load_prompts(path, form, tokenizer).prompts
    assert prompt.content == "Q: {1}+{}=\nA {x}:"
    assert prompt.token_ids.tolist() == tokenizer(prompt.content, add_special_tokens=False)["input_ids"]
    assert prompt.metadata[MESSAGES_KEY] == [{"role": "user", "content": "{1}+{}="}]


@pytest.mark.parametrize(
    ("cut", "kept"),
    [("left", "6789"), ("right", "1234"), ("middle", "1289")],
)
def test_long_prompts_are_shortened_at_the_side_that_is_given(write_rows, tokenizer, cut, kept):
    path = write_rows([{"prompt": text, "label": 1} for text in ("123", "123456789", "1234")])
    form = prompt_format(apply_chat_template=False, max_prompt_len=4, truncation=cut)
    found = load_prompts(path, form, tokenizer)
    assert [prompt.content for prompt in found.prompts] == ["123", kept, "1234"]
    assert [prompt.token_ids.tolist() for prompt in found.prompts] == [
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("123", kept, "1234")
    ]
    assert [prompt.metadata for prompt in found.prompts] == [{}, {"prompt_tokens_cut": 5}, {}]
    assert found.too_long == 0


def test_odd_limit_keeps_more_of_the_end():
    assert truncated(list(range(10)), 3, "middle") == [0, 8, 9]
    assert truncated(list(range(10)), 1, "middle") == [9]


def test_overlong_prompt_is_rejected_with_the_flag(write_rows, tokenizer):
    path = write_rows([{"prompt": "x" * n, "label": n} for n in (3, 5, 4)])
    form = prompt_format(apply_chat_template=False, max_prompt_len=4, refuse_too_long=True)
    with pytest.raises(ValueError, match=r":2: the prompt has 5 tokens, more than 4"):
        load_prompts(path, form, tokenizer)


def test_limit_that_leaves_no_prompt_is_rejected(write_rows, tokenizer):
    path = write_rows([{"prompt": "xxxxx", "label": 1}])
    with pytest.raises(ValueError, match="all 1 prompts are longer than the limit of 2 tokens"):
        load_prompts(path, prompt_format(max_prompt_len=2), tokenizer)


def test_every_invalid_row_is_named(write_rows, tokenizer):
    rows = [
        {"prompt": "good", "label": 1},
        {"text": "a", "label": 1},
        {"prompt": "no label"},
        {"prompt": [{"content": "no role"}], "label": 1},
        {"prompt": "", "label": 1},
        {"prompt": "a", "label": 1, "metadata": "not json"},
        {"prompt": "a", "label": 1, "metadata": [1]},
        {"prompt": "a", "label": 1, "tools": {"a": 1}},
    ]
    path = write_rows(rows)
    with pytest.raises(ValueError) as caught:
        load_prompts(path, prompt_format(), tokenizer)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("7 bad rows in ")
    assert [line.strip().split(": ")[0] for line in lines[1:]] == [f"{path}:{number}" for number in range(2, 9)]
    assert "no column 'prompt' (--input-key); it has ['label', 'text']" in lines[1]
    assert "no column 'label' (--label-key)" in lines[2]
    assert "'metadata' is text that is not JSON" in lines[5]


def test_chat_template_error_is_quoted(write_rows, tokenizer):
    path = write_rows([{"prompt": [{"role": "user"}, {"role": "user", "content": {"a": 1}}], "label": 1}])
    refusing = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)
    refusing.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"train.jsonl:1: the chat template rejects it: .*roles must alternate"):
        load_prompts(path, prompt_format(), refusing)


def test_messages_without_a_template_are_kept_only_for_a_custom_generate_function(write_rows, tokenizer):
    path = write_rows([{"prompt": CONVERSATION, "label": 1}])
    with pytest.raises(ValueError, match="messages need --apply-chat-template"):
        load_prompts(path, prompt_format(apply_chat_template=False), tokenizer)
    (prompt,) = load_prompts(path, prompt_format(apply_chat_template=False, keep_messages=True), tokenizer).prompts
    assert prompt.content == CONVERSATION
    assert prompt.token_ids.tolist() == []


def test_samples_of_one_prompt_share_nothing_mutable(write_rows, tokenizer):
    path = write_rows([{"prompt": "a", "label": {"deep": [1]}, "metadata": '{"deep": [1]}'}])
    (prompt,) = load_prompts(path, prompt_format(), tokenizer).prompts
    first, second = (prompt.sample(group_index=0, index=index) for index in range(2))
    first.tokens.append(7)
    first.label["deep"].append(2)
    first.metadata["deep"].append(2)
    assert second.tokens == prompt.token_ids.tolist()
    assert second.label == {"deep": [1]} and second.metadata == {"deep": [1]}
    assert prompt.sample(group_index=0, index=1) == second


def test_fingerprint_covers_rows_order_and_labels(write_rows, tokenizer):
    rows = [{"prompt": "ab", "label": 1}, {"prompt": "c", "label": 2}]
    variants = [rows, rows[::-1], [{"prompt": "a", "label": 1}, {"prompt": "bc", "label": 2}], rows[:1]]
    variants.append([{**rows[0], "label": "1"}, rows[1]])

    def fingerprint(path):
        rows = PromptDataset([path], prompt_format(apply_chat_template=False), tokenizer, 0)
        rows.check()
        return rows.fingerprint

    prints = [fingerprint(write_rows(variant)) for variant in variants]
    assert len(set(prints)) == len(variants)
    path = write_rows(rows * 3, "longer.jsonl")
    assert fingerprint(f"{path}@[2:4]") == fingerprint(write_rows(rows)) == prints[0]


def test_parquet_file_without_the_column_is_rejected_with_its_columns(tmp_path, tokenizer):
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"], "answer": ["b"]}), path)
    with pytest.raises(
        ValueError, match=r"no column 'prompt' \(--input-key\): set --input-key to one of 'answer', 'question'"
    ):
        load_prompts(str(path), prompt_format(), tokenizer)
