"""Bin packing: bounds, the smallest number of bins against an exhaustive reference, and balance."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimrl.data import bins

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=8)


def fewest_bins(lengths: list[int], cap: int) -> int:
    """Exact minimum by trying every subset as the next bin; a sample over the cap counts as one bin."""
    over = sum(1 for length in lengths if length > cap)
    items = [length for length in lengths if length <= cap]
    full = (1 << len(items)) - 1
    weight = [sum(items[i] for i in range(len(items)) if subset >> i & 1) for subset in range(full + 1)]
    best = [0] + [math.inf] * full
    for subset in range(1, full + 1):
        part = subset
        while part:
            if weight[part] <= cap:
                best[subset] = min(best[subset], best[subset ^ part] + 1)
            part = (part - 1) & subset
    return over + int(best[full])


@given(LENGTHS, st.integers(1, 40))
def test_the_lower_bound_never_exceeds_the_true_minimum(lengths, cap):
    assert bins.lower_bound(lengths, cap) <= fewest_bins(lengths, cap)


@settings(max_examples=300)
@given(LENGTHS, st.integers(1, 40), st.integers(1, 4))
def test_small_inputs_get_the_fewest_bins_that_are_a_multiple_of_the_ranks(lengths, cap, ranks):
    needed = math.ceil(fewest_bins(lengths, cap) / ranks) * ranks
    if needed > len(lengths):
        with pytest.raises(ValueError, match=f"{len(lengths)} samples cannot fill {needed} micro-batches"):
            bins.pack(lengths, [float(length) for length in lengths], cap, ranks)
        return
    dealt = bins.pack(lengths, [float(length) for length in lengths], cap, ranks)
    assert [len(rank) for rank in dealt] == [needed // ranks] * ranks
    groups = list(itertools.chain(*dealt))
    assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or sum(lengths[i] for i in group) <= cap
        assert group


def test_a_packing_that_greedy_rules_miss_is_found():
    # Two bins of exactly 10 (5+3+2 and 4+2+2+2); best-fit decreasing puts 5 with 4, and a 2 is left over.
    lengths = [5, 4, 3, 2, 2, 2, 2]
    assert len(bins.best_fit_decreasing(lengths, 10)) == 3
    assert bins.spread(lengths, [float(length) for length in lengths], 10, 2) is None
    dealt = bins.pack(lengths, [float(length) for length in lengths], 10, 1)
    assert sorted(sum(lengths[i] for i in group) for group in dealt[0]) == [10, 10]


def test_a_sample_longer_than_the_cap_is_alone():
    dealt = bins.pack([50, 3, 4, 60], [50.0, 3.0, 4.0, 60.0], 10, 1)
    assert sorted(dealt[0]) == [[0], [2, 1], [3]]


def test_ranks_with_one_dear_sample_still_get_their_share_of_bins():
    # The dear sample alone outweighs a rank's fair share; the rank must get a second bin nevertheless.
    lengths = [100] + [30] * 11
    dealt = bins.pack(lengths, [length**2 for length in lengths], 100, 3)
    assert [len(rank) for rank in dealt] == [2, 2, 2]


@pytest.mark.parametrize(("samples", "ranks", "cap"), [(4096, 64, 16384), (512, 8, 16384), (256, 4, 8192)])
def test_log_normal_lengths_are_packed_at_the_lower_bound_and_balanced_within_a_percent(samples, ranks, cap):
    rng = random.Random(samples)
    lengths = [min(max(round(math.exp(rng.gauss(7.5, 0.8))), 16), cap) for _ in range(samples)]
    costs = [length + length**2 / 32768 for length in lengths]
    dealt = bins.pack(lengths, costs, cap, ranks)
    assert {len(rank) for rank in dealt} == {math.ceil(bins.lower_bound(lengths, cap) / ranks)}
    totals = [sum(costs[i] for group in rank for i in group) for rank in dealt]
    assert max(totals) * ranks / sum(totals) < 1.01


def test_bins_stand_dearest_first_on_every_rank():
    rng = random.Random(3)
    lengths = [rng.randint(1, 100) for _ in range(64)]
    for rank in bins.pack(lengths, [float(length) for length in lengths], 120, 4):
        sums = [sum(lengths[i] for i in group) for group in rank]
        assert sums == sorted(sums, reverse=True)
