"""An interrupted response ends where it would have ended uninterrupted, at any cut."""

from __future__ import annotations

import pytest

from slimrl.data.sample import Sample, SampleStatus
from slimrl.rollout.generation.multi_turn import end_at_stop_string


def cut_and_continued(tokenizer, text: str, cut: int, stop, *, status=SampleStatus.COMPLETED) -> Sample:
    """`text` as a response cut after `cut` bytes and continued."""
    response = tokenizer(text, add_special_tokens=False)["input_ids"]
    sample = Sample(prompt="q", tokens=[7, 8, 9, *response], response_length=len(response), status=status)
    sample.loss_mask, sample.rollout_log_probs = [1] * len(response), [-0.5] * len(response)
    end_at_stop_string(sample, len(response) - cut, stop, tokenizer.decode)
    return sample


@pytest.mark.parametrize("cut", range(1, 11))
def test_stop_string_across_requests_ends_the_response_after_it(tokenizer, cut):
    # "ab<END>cd": after the seam the engine saw no complete <END> if the cut is inside it
    sample = cut_and_continued(tokenizer, "ab<END>cdef", cut, ["<END>"], status=SampleStatus.TRUNCATED)
    if 3 <= cut <= 6:
        assert sample.response == "ab<END>" and sample.status is SampleStatus.COMPLETED
        assert sample.response_length == len(sample.loss_mask) == len(sample.rollout_log_probs) == 7
        assert len(sample.tokens) == 3 + 7
    else:  # before or after the seam: the engine's own task
        assert sample.response == "ab<END>cdef" and sample.status is SampleStatus.TRUNCATED
        assert sample.response_length == 11 and len(sample.tokens) == 14


def test_first_of_several_stop_strings_ends_the_response(tokenizer):
    assert cut_and_continued(tokenizer, "a..bb!!", 2, ["bb!!", "..b"]).response == "a..b"
    assert cut_and_continued(tokenizer, "a..bb!!", 2, "..b").response == "a..b"


def test_multi_token_characters_survive_a_cut_inside_them(tokenizer):
    text = "π ≈ 3.14…"
    for cut in range(1, len(text.encode())):
        for stop in (None, [], ["never"]):
            sample = cut_and_continued(tokenizer, text, cut, stop)
            assert sample.response == text and sample.response_length == len(text.encode())
