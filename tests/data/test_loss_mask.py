"""Which tokens of a conversation are trained, with a tokenizer of one token per character."""

from __future__ import annotations

import pytest

from slimrl.data.loss_mask import TURN_MARKS, assistant_spans, conversation_mask, trained_turns

TEXT = (
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
    "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\nso long<|im_end|>\n"
)
OFFSETS = [(place, place + 1) for place in range(len(TEXT))]


def trained_text(trained: list[bool]) -> str:
    mask = conversation_mask(OFFSETS, assistant_spans(TEXT, TURN_MARKS["qwen"]), trained)
    return "".join(letter for letter, chosen in zip(TEXT, mask, strict=True) if chosen)


def test_assistant_text_and_end_of_turn_tokens_are_trained():
    assert trained_text([True, True]) == "hello<|im_end|>so long<|im_end|>"


def test_turn_may_be_excluded():
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "step_loss_mask": 0},
        {"role": "assistant", "content": "so long"},
    ]
    assert trained_turns(messages) == [False, True]
    assert trained_text([False, True]) == "so long<|im_end|>"


def test_text_may_start_with_an_assistant_turn():
    marks = TURN_MARKS["qwen"]
    assert assistant_spans(f"{marks.before[0]}hi{marks.after[0]}", marks) == [(22, 22 + len("hi<|im_end|>"))]


def test_last_turn_without_an_end_token_extends_to_the_end():
    marks = TURN_MARKS["distill_qwen"]
    text = "<｜User｜>hi<｜Assistant｜>hello"
    assert [text[start:end] for start, end in assistant_spans(text, marks)] == ["hello"]


def test_template_of_another_family_is_rejected():
    with pytest.raises(ValueError, match="rendered 0 assistant turns but the conversation has 2: choose"):
        conversation_mask(OFFSETS, assistant_spans(TEXT, TURN_MARKS["distill_qwen"]), [True, True])
