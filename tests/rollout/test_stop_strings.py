"""A response that was cut off ends where it would have ended uncut, wherever it was cut."""

from __future__ import annotations

import pytest

from slimrl.data.sample import Sample, SampleStatus
from slimrl.rollout.generation.multi_turn import end_at_stop_string


def cut_and_continued(tokenizer, text: str, cut: int, stop, *, status=SampleStatus.COMPLETED) -> Sample:
    """`text` as a response that was cut after `cut` bytes and continued."""
    response = tokenizer(text, add_special_tokens=False)["input_ids"]
    sample = Sample(prompt="q", tokens=[7, 8, 9, *response], response_length=len(response), status=status)
    sample.loss_mask, sample.rollout_log_probs = [1] * len(response), [-0.5] * len(response)
    end_at_stop_string(sample, len(response) - cut, stop, tokenizer.decode)
    return sample


@pytest.mark.parametrize("cut", range(1, 11))
def test_a_stop_string_over_the_seam_ends_the_response_behind_it(tokenizer, cut):
    # "ab<END>cd": from the seam on the engine saw no whole <END> where the cut is within it
    sample = cut_and_continued(tokenizer, "ab<END>cdef", cut, ["<END>"], status=SampleStatus.TRUNCATED)
    if 3 <= cut <= 6:
        assert sample.response == "ab<END>" and sample.status is SampleStatus.COMPLETED
        assert sample.response_length == len(sample.loss_mask) == len(sample.rollout_log_probs) == 7
        assert len(sample.tokens) == 3 + 7
    else:  # before the seam or behind it: the engine's own business
        assert sample.response == "ab<END>cdef" and sample.status is SampleStatus.TRUNCATED
        assert sample.response_length == 11 and len(sample.tokens) == 14


def test_the_first_of_several_stop_strings_ends_it(tokenizer):
    assert cut_and_continued(tokenizer, "a..bb!!", 2, ["bb!!", "..b"]).response == "a..b"
    assert cut_and_continued(tokenizer, "a..bb!!", 2, "..b").response == "a..b"


def test_characters_of_several_tokens_survive_a_cut_within_them(tokenizer):
    text = "π ≈ 3.14…"
    for cut in range(1, len(text.encode())):
        for stop in (None, [], ["never"]):
            sample = cut_and_continued(tokenizer, text, cut, stop)
            assert sample.response == text and sample.response_length == len(text.encode())
