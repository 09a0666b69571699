"""The samples of a pair stay together, in order, in one micro-batch of one rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slimrl.data.batch_schedule import schedule_batch
from slimrl.data.train_batch import RolloutBatch
from tests.data.test_packing import make_batch


def pairs_of(lengths: list[int]) -> RolloutBatch:
    batch = make_batch(lengths)
    batch.group_ids = torch.arange(len(lengths)) // 2
    return batch


@st.composite
def cases(draw):
    ranks = draw(st.integers(1, 3))
    size = draw(st.sampled_from([2, 4]))
    step = size * ranks * draw(st.integers(1, 3)) * 2
    steps = draw(st.integers(1, 2))
    lengths = draw(st.lists(st.integers(2, 40), min_size=step * steps, max_size=step * steps))
    return lengths, {
        "data_parallel_size": ranks,
        "context_parallel_size": draw(st.integers(1, 2)),
        "micro_batch_group": draw(st.integers(1, 2)),
        "global_batch_size": step,
        "micro_batch_size": size,
        "max_tokens_per_micro_batch": draw(st.sampled_from([None, 8, 60])),
        "balance": draw(st.booleans()),
    }


@given(cases())
def test_pairs_are_whole_in_every_micro_batch(case):
    lengths, options = case
    ranks = schedule_batch(pairs_of(lengths), **options, samples_together=2)
    seen: list[int] = []
    for batch in ranks:
        for step, groups in enumerate(batch.micro_batches):
            for rows in groups:
                ids = [int(batch.sample_ids[row]) - 100 for row in rows]
                assert ids[1::2] == [first + 1 for first in ids[::2]] and all(first % 2 == 0 for first in ids[::2])
                assert all(sample // options["global_batch_size"] == step for sample in ids)
                seen += ids
    assert sorted(seen) == list(range(len(lengths)))
    assert len({tuple(len(groups) for groups in batch.micro_batches) for batch in ranks}) == 1


def test_cap_holds_for_all_micro_batches_of_several_pairs():
    (batch,) = schedule_batch(
        pairs_of([10, 12, 3, 4, 20, 30, 5, 6]),
        data_parallel_size=1,
        global_batch_size=8,
        micro_batch_size=1,
        max_tokens_per_micro_batch=40,
        balance=False,
        samples_together=2,
    )
    tokens = [[int(batch.total_lengths[rows].sum()), len(rows)] for rows in batch.micro_batches[0]]
    assert sorted(tokens) == [[40, 6], [50, 2]]  # a pair of 50 tokens, above the cap, is alone


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ([0, 0, 1, 1], {"micro_batch_size": 1}, "--micro-batch-size 1 divides pairs"),
        ([0, 0, 1, 1], {"global_batch_size": 1}, "--global-batch-size 1 divides pairs"),
        ([0, 1, 1, 0], {}, "are not 2 groups of 2: return each pair as one group"),
        ([0, 0, 0, 0], {}, "are not 2 groups of 2"),
    ],
)
def test_batch_that_divides_pairs_is_rejected(groups, options, message):
    batch = pairs_of([3, 4, 5, 6])
    batch.group_ids = torch.tensor(groups)
    values = {"data_parallel_size": 1, "global_batch_size": 4, "micro_batch_size": 2, "balance": False}
    with pytest.raises(ValueError, match=message):
        schedule_batch(batch, **{**values, **options}, max_tokens_per_micro_batch=None, samples_together=2)
