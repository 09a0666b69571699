"""Packed columns behave like the lists that they stand for."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch

from slimrl.data.sample import PackedColumn, Sample, SampleStatus
from slimrl.data.train_batch import batch_from_samples
from slimrl.engines.protocol import Generation
from slimrl.rollout.generation.multi_turn import append_generation, append_tool_output
from slimrl.rollout.metrics import trained_tokens

IDS, LOG_PROBS = [7, 8, 9], [-0.5, -0.1, -2.0]


def packed_generation(finish="stop", version="3"):
    generation = Generation([], [], finish, version, "text")
    generation.pack("token_ids", PackedColumn(np.array(IDS, "i4").tobytes(), "i4"))
    generation.pack("log_probs", PackedColumn(np.array(LOG_PROBS, "f8").tobytes(), "f8"))
    return generation


def plain_generation(finish="stop", version="3"):
    return Generation(list(IDS), list(LOG_PROBS), finish, version, "text")


def generated(generation):
    sample = Sample(prompt="p", index=1, group_index=0, tokens=[1, 2])
    append_generation(sample, generation)
    return sample


def is_packed(sample, *names):
    return [isinstance(sample.column(name), PackedColumn) for name in names]


def test_packed_sample_equals_a_plain_one_field_by_field():
    packed, plain = generated(packed_generation()), generated(plain_generation())
    assert is_packed(packed, "tokens", "loss_mask", "rollout_log_probs") == [True] * 3
    assert is_packed(plain, "tokens", "loss_mask", "rollout_log_probs") == [False] * 3
    assert packed.prompt_length == 2 and trained_tokens(packed) == 3
    for field in dataclasses.fields(Sample):
        assert getattr(packed, field.name) == getattr(plain, field.name)
    assert [type(value) for value in packed.tokens + packed.loss_mask] == [int] * 8
    assert [type(value) for value in packed.rollout_log_probs] == [float] * 3
    assert packed == plain


@pytest.mark.parametrize(
    "view",
    [
        vars,
        copy.copy,
        copy.deepcopy,
        dataclasses.replace,
        repr,
        Sample.to_dict,
        lambda s: pickle.loads(pickle.dumps(s)),
    ],
)
def test_every_view_of_a_sample_has_lists(view):
    seen, expected = (view(generated(make())) for make in (packed_generation, plain_generation))
    assert seen == expected
    if isinstance(seen, Sample):
        assert is_packed(seen, "tokens", "loss_mask", "rollout_log_probs") == [False] * 3


def test_shallow_copy_shares_its_lists_like_any_other():
    sample = generated(packed_generation())
    copied = copy.copy(sample)
    assert copied.tokens is sample.tokens


def test_list_belongs_to_the_sample_and_may_be_changed_or_replaced():
    sample = generated(packed_generation())
    sample.rollout_log_probs[0] = -9.0
    sample.tokens.append(4)
    assert sample.tokens == [1, 2, *IDS, 4] and sample.rollout_log_probs[0] == -9.0
    replaced = generated(packed_generation())
    replaced.loss_mask = [0, 1, 1]
    assert replaced.column("loss_mask") == replaced.loss_mask == [0, 1, 1] == vars(replaced)["loss_mask"]
    assert is_packed(replaced, "tokens", "rollout_log_probs") == [True] * 2 or vars(replaced)["tokens"] == [1, 2, *IDS]
    replaced.loss_mask = None
    assert replaced.loss_mask is None and trained_tokens(replaced) == 3


def test_prompt_of_a_packed_sample_is_its_own():
    prompt = [1, 2]
    sample = Sample(tokens=prompt)
    append_generation(sample, packed_generation())
    prompt.append(99)
    assert sample.tokens == [1, 2, *IDS]


def test_continued_samples_and_tools_extend_the_same_lists():
    samples = []
    for make in (packed_generation, plain_generation):
        sample = generated(make("abort", "3"))
        append_generation(sample, make("stop", "4"))
        append_tool_output(sample, [5])
        append_generation(sample, make("length", "4"))
        samples.append(sample)
    assert samples[0] == samples[1] and samples[0].loss_mask == [1] * 6 + [0] + [1] * 3


def test_batch_is_the_same_with_packed_and_plain_samples():
    def batch(samples):
        for number, sample in enumerate(samples):
            sample.index, sample.status = number, SampleStatus.COMPLETED
        return batch_from_samples(samples, torch.zeros(4), torch.zeros(4))

    masked = generated(packed_generation())
    masked.loss_mask = [1, 0, 1]
    removed = generated(packed_generation())
    removed.remove_sample = True
    first = batch([generated(packed_generation()), masked, removed, generated(plain_generation())])
    plain = [generated(plain_generation()) for _ in range(4)]
    plain[1].loss_mask, plain[2].remove_sample = [1, 0, 1], True
    second = batch(plain)
    for name in ("tokens", "loss_mask", "rollout_log_probs", "total_lengths", "response_lengths"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert first.tokens.dtype == torch.int64 and first.rollout_log_probs.dtype == torch.float32


def test_unset_and_unknown_fields_are_reported_as_before():
    sample = Sample()
    assert sample.loss_mask is None and sample.rollout_log_probs is None and sample.tokens == []
    assert sample.teacher_log_probs is None
    with pytest.raises(AttributeError, match="a Sample has no nonsense"):
        _ = sample.nonsense
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = plain_generation().nonsense
    with pytest.raises(ValueError, match="response cannot be packed"):
        sample.pack("response", PackedColumn(b"", "u1"))
    with pytest.raises(ValueError, match="3 bytes are no whole numbers of i4"):
        PackedColumn(b"abc", "i4")


def test_generation_equals_a_plain_one():
    packed = packed_generation()
    assert packed.new_tokens == 3 and packed == plain_generation() and packed.token_ids[-1] == 9
    assert dataclasses.asdict(packed_generation()) == dataclasses.asdict(plain_generation())
