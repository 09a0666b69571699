"""The byte-level tokenizer: lossless, one token per digit, one token per word of the template."""

import pytest

from slimrl.tiny.models import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(max_length=64)


@pytest.mark.parametrize("text", ["", "37+45=", r"so \boxed{82}.", "Grüße, 漢字 🙂\n\ttab", "useruser assistants {}"])
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_digits_and_the_box_are_single_tokens(tokenizer):
    assert tokenizer.tokenize(r"\boxed{82}") == [r"\boxed{", "8", "2", "}"]


def test_chat_template_is_chatml(tokenizer):
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2="}]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"
    )


def test_full_prompt_is_fourteen_tokens(tokenizer):
    messages = [{"role": "user", "content": "37+45="}]
    assert len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)) == 14


def test_vocabulary_is_not_a_multiple_of_128_to_exercise_padding(tokenizer):
    assert len(tokenizer) == 281
