"""The micro-batch schedule: its invariants over random batches, and small cases by hand."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimrl.data.batch_schedule import schedule_batch, sequence_multiple
from slimrl.data.images.batch import IN_PROMPT, BatchImages
from slimrl.data.sample import Sample
from slimrl.data.train_batch import RolloutBatch, batch_from_samples


def make_batch(lengths: list[int], masks: list[list[int]] | None = None) -> RolloutBatch:
    """Samples with a prompt of one token, whose tokens all equal the sample's id."""
    samples = [
        Sample(
            prompt="p",
            index=100 + row,
            group_index=row,
            tokens=[100 + row] * length,
            response_length=length - 1,
            loss_mask=masks[row] if masks else None,
            rollout_log_probs=[-1.0] * (length - 1),
        )
        for row, length in enumerate(lengths)
    ]
    return batch_from_samples(samples, torch.zeros(len(samples)), torch.zeros(len(samples)))


def schedule(lengths: list[int], **options) -> list[RolloutBatch]:
    defaults = {
        "data_parallel_size": 1,
        "global_batch_size": len(lengths),
        "micro_batch_size": 1,
        "max_tokens_per_micro_batch": None,
        "balance": False,
    }
    return schedule_batch(make_batch(lengths), **{**defaults, **options})


def ids_by_step(ranks: list[RolloutBatch], step: int) -> list[int]:
    """Sample ids of one step over all ranks and micro-batches, sorted."""
    return sorted(int(batch.sample_ids[row]) for batch in ranks for group in batch.micro_batches[step] for row in group)


@st.composite
def cases(draw):
    ranks = draw(st.integers(1, 4))
    micro_batch_size = draw(st.integers(1, 3))
    step_size = 2 * ranks * micro_batch_size * draw(st.integers(1, 3))
    steps = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 40), min_size=steps * step_size, max_size=steps * step_size))
    return lengths, {
        "data_parallel_size": ranks,
        "global_batch_size": step_size,
        "micro_batch_size": micro_batch_size,
        "max_tokens_per_micro_batch": draw(st.one_of(st.none(), st.integers(5, 60))),
        "balance": draw(st.booleans()),
        "context_parallel_size": draw(st.integers(1, 3)),
        "micro_batch_group": draw(st.integers(1, 2)),
    }


def test_samples_with_images_are_balanced_by_their_patches():
    """Eight samples of the same length; a patch of the tower costs as much as a token of the decoder."""
    batch = make_batch([100] * 8)
    images = BatchImages(
        pixel_values=torch.zeros(48, 1),
        grids=torch.tensor([[1, 4, 4], [1, 4, 8]]),
        index=torch.tensor([0, 0, 1, 0]),  # the first sample has both uses of the small one
        counts=torch.tensor([2, 1, 1, 0, 0, 0, 0, 0]),
        starts=torch.full((4,), IN_PROMPT),
    )
    assert images.patches_of_samples() == [32, 32, 16, 0, 0, 0, 0, 0]
    options = {"global_batch_size": 8, "micro_batch_size": 1, "max_tokens_per_micro_batch": 400, "balance": True}
    shares = schedule_batch(dataclasses.replace(batch, images=images), data_parallel_size=2, patch_cost=1.0, **options)
    patches = [0 if share.images is None else sum(share.images.patches_of_samples()) for share in shares]
    assert sorted(patches) == [32, 48]  # as even as three samples with images can be
    blind = schedule_batch(dataclasses.replace(batch, images=images), data_parallel_size=2, **options)
    assert [len(share.total_lengths) for share in (*shares, *blind)] == [4, 4, 4, 4]


@settings(max_examples=200, deadline=None)
@given(cases())
def test_schedule_satisfies_all_invariants(case):
    lengths, options = case
    ranks = schedule(lengths, **options)
    cap, step_size = options["max_tokens_per_micro_batch"], options["global_batch_size"]
    steps, multiple = len(lengths) // step_size, sequence_multiple(options["context_parallel_size"])
    assert len(ranks) == options["data_parallel_size"]
    for step in range(steps):
        # every sample once, in the step of its position; the same number of micro-batches everywhere
        first = 100 + step * step_size
        assert ids_by_step(ranks, step) == list(range(first, first + step_size))
        assert len({len(batch.micro_batches[step]) for batch in ranks}) == 1
        assert len(ranks[0].micro_batches[step]) % options["micro_batch_group"] == 0
    for batch in ranks:
        assert batch.samples_per_step == [step_size] * steps
        assert sorted(row for step in batch.micro_batches for group in step for row in group) == list(range(len(batch)))
        assert batch.tokens.tolist() == torch.repeat_interleave(batch.sample_ids, batch.total_lengths).tolist()
        for group in (group for step in batch.micro_batches for group in step):
            padded = sum(-(-length // multiple) * multiple for length in batch.total_lengths[group].tolist())
            fits = cap is not None and padded <= cap * options["context_parallel_size"]
            assert len(group) == options["micro_batch_size"] if cap is None else len(group) == 1 or fits
    again = schedule(lengths, **options)
    assert [batch.micro_batches for batch in again] == [batch.micro_batches for batch in ranks]
    assert all(torch.equal(one.tokens, other.tokens) for one, other in zip(again, ranks, strict=True))


def test_static_micro_batches_keep_the_order_and_are_contiguous_per_rank():
    first, second = schedule([3, 9, 4, 8, 5, 7, 6, 2], data_parallel_size=2, micro_batch_size=2)
    assert first.sample_ids.tolist() == [100, 101, 102, 103]
    assert second.sample_ids.tolist() == [104, 105, 106, 107]
    assert first.micro_batches == second.micro_batches == [[[0, 1], [2, 3]]]


def test_unbalanced_dynamic_micro_batches_are_assigned_round_robin():
    first, second = schedule([8] * 6, data_parallel_size=2, max_tokens_per_micro_batch=8)
    assert first.sample_ids.tolist() == [100, 102, 104]
    assert second.sample_ids.tolist() == [101, 103, 105]
    assert first.micro_batches == second.micro_batches == [[[0], [1], [2]]]


def test_dynamic_micro_batches_are_as_few_as_the_cap_allows():
    (batch,) = schedule([3, 9, 4, 8, 5, 7, 6, 2], max_tokens_per_micro_batch=11)
    assert len(batch.micro_batches[0]) == 4  # 44 tokens in bins of 11
    sums = [int(batch.total_lengths[group].sum()) for group in batch.micro_batches[0]]
    assert sums == [11, 11, 11, 11]


def test_context_parallelism_multiplies_the_token_cap_of_a_micro_batch():
    lengths = [8] * 12
    (alone,) = schedule(lengths, max_tokens_per_micro_batch=16)
    (shared,) = schedule(lengths, max_tokens_per_micro_batch=16, context_parallel_size=2)
    assert [len(group) for group in alone.micro_batches[0]] == [2] * 6
    assert [len(group) for group in shared.micro_batches[0]] == [4] * 3


def test_sample_lengths_include_context_parallel_padding():
    (batch,) = schedule([5] * 4, max_tokens_per_micro_batch=10, context_parallel_size=2)  # 8 tokens each, of 20
    assert [len(group) for group in batch.micro_batches[0]] == [2, 2]


def test_virtual_pipeline_gets_whole_groups_of_micro_batches():
    (batch,) = schedule([8] * 12, max_tokens_per_micro_batch=32, micro_batch_group=4)
    assert [len(group) for group in batch.micro_batches[0]] == [3] * 4  # three micro-batches would hold them


@pytest.mark.parametrize("cap", [None, 60])
def test_balancing_equalizes_the_cost_of_the_ranks(cap):
    lengths = [40, 38, 36, 34, 6, 5, 4, 3]

    def spread(balance: bool) -> float:
        ranks = schedule(lengths, data_parallel_size=2, max_tokens_per_micro_batch=cap, balance=balance)
        totals = [int(batch.total_lengths.sum()) for batch in ranks]
        return max(totals) / min(totals)

    assert spread(balance=True) < 1.06
    if cap is None:
        assert spread(balance=False) > 8  # 148 against 18: one rank would wait for the other


@pytest.mark.parametrize(("break_even", "tokens"), [(1, [20, 40]), (10**9, [30, 30])])
def test_long_sample_costs_as_much_attention_as_several_short_ones(break_even, tokens):
    # at a break-even of 1 the sample of 20 costs 420 and each of 10 costs 110: four of those weigh as much as it
    ranks = schedule(
        [20, 10, 10, 10, 10],
        data_parallel_size=2,
        max_tokens_per_micro_batch=40,
        balance=True,
        break_even_tokens=break_even,
    )
    assert sorted(int(batch.total_lengths.sum()) for batch in ranks) == tokens


def test_trained_tokens_are_summed_over_all_ranks_without_masked_ones():
    batch = make_batch([4, 3, 2, 5], masks=[[1, 0, 1], [0, 0], [1], [1, 1, 1, 1]])
    ranks = schedule_batch(
        batch,
        data_parallel_size=2,
        global_batch_size=2,
        micro_batch_size=1,
        max_tokens_per_micro_batch=None,
        balance=True,
    )
    assert [rank.tokens_per_step for rank in ranks] == [[2, 5], [2, 5]]
    assert [rank.samples_per_step for rank in ranks] == [[2, 2], [2, 2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 4}, "6 samples, which is not a multiple of --global-batch-size 4"),
        ({"micro_batch_size": 4}, "--global-batch-size 6 is not divisible by 1 .* --micro-batch-size 4"),
        ({"data_parallel_size": 4}, "--global-batch-size 6 is not divisible by 4"),
        ({"micro_batch_group": 4}, "--micro-batch-size 1 x 4 micro-batches per group of virtual pipeline stages"),
        (
            {"micro_batch_group": 4, "max_tokens_per_micro_batch": 5},
            r"6 samples cannot fill 8 micro-batches \(8 in groups of 4 on each of 1 data-parallel",
        ),
        (
            {"data_parallel_size": 4, "max_tokens_per_micro_batch": 5},
            r"6 samples cannot fill 8 micro-batches \(2 on each of 4 data-parallel ranks, at most 5 tokens each\)",
        ),
    ],
)
def test_indivisible_batches_are_rejected_with_their_flags(options, message):
    with pytest.raises(ValueError, match=message):
        schedule([5] * 6, **options)


def test_empty_rollout_is_rejected():
    with pytest.raises(ValueError, match="0 samples"):
        schedule([], global_batch_size=4)


@pytest.mark.parametrize(("ranks", "multiple"), [(1, 1), (2, 4), (3, 6), (8, 16)])
def test_context_parallelism_splits_a_sample_into_two_chunks_per_rank(ranks, multiple):
    assert sequence_multiple(ranks) == multiple
