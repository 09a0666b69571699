"""Bin packing of plain integers: which samples share a micro-batch, which micro-batches share a rank.

Pure and deterministic: equal input gives equal output, ties are broken by position. Knows nothing of
tensors; `packing.py` is its caller.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

Bins = list[list[int]]  # positions of the samples in each bin

# Branch-and-bound is for small inputs, where a bin more or less matters; the limit keeps it to milliseconds.
_SEARCH_MAX_SAMPLES = 64
_SEARCH_MAX_NODES = 20_000
# Full bins that spreading may look at, per sample, before it gives up: where the cap is so tight, it seldom succeeds.
_SPREAD_PATIENCE = 12


def lower_bound(lengths: Sequence[int], cap: int) -> int:
    """No packing under `cap` has fewer bins: full bins for the short samples, one for each longer than the cap.

    Also counts samples over half the cap, no two of which can share a bin.
    """
    short = [length for length in lengths if length <= cap]
    over = len(lengths) - len(short)
    by_volume = -(-sum(short) // cap)
    by_size = sum(1 for length in short if 2 * length > cap)
    return over + max(by_volume, by_size)


def pack(lengths: Sequence[int], costs: Sequence[float], cap: int, ranks: int, group: int = 1) -> list[Bins]:
    """Bins of at most `cap` tokens for each rank: as few as can be found, the same number on every rank, none empty.

    That number is a multiple of `group`.

    A sample longer than the cap has a bin of its own. `costs` are evened out over the ranks, and over the bins
    of a rank, as far as the cap leaves room. Bins stand dearest first, so that ranks work on similar ones together.

    Raises ValueError where there are fewer samples than bins.
    """
    tight = best_fit_decreasing(lengths, cap)
    unit = ranks * group
    n_bins = -(-max(lower_bound(lengths, cap), 1) // unit) * unit
    while n_bins <= len(lengths):
        dealt = _ranks_first(lengths, costs, cap, ranks, n_bins // ranks)
        if dealt is not None:
            return dealt
        bins = fit(lengths, costs, cap, n_bins, tight)
        if bins is None and len(lengths) <= _SEARCH_MAX_SAMPLES:
            found = search(lengths, cap, n_bins)
            bins = None if found is None else split_to(found, costs, n_bins)
        if bins is not None:
            return deal(bins, costs, ranks)
        n_bins += unit
    in_groups = "" if group == 1 else f" in groups of {group}"
    raise ValueError(
        f"{len(lengths)} samples cannot fill {n_bins} micro-batches ({n_bins // ranks}{in_groups} on each of {ranks}"
        f" data-parallel ranks, at most {cap} tokens each): make --global-batch-size a multiple of the ranks"
        + (" x that group" if group > 1 else "")
    )


def _ranks_first(
    lengths: Sequence[int], costs: Sequence[float], cap: int, ranks: int, bins_per_rank: int
) -> list[Bins] | None:
    """Spread the samples over the ranks, then pack each rank's own; None where one rank's do not fit its bins.

    The totals of the ranks come out far more even than by dealing out finished bins.
    """
    held = [min(length, cap) for length in lengths]  # a longer sample takes a whole bin
    shares = spread(held, costs, cap * bins_per_rank, ranks)
    if shares is None:
        return None
    _top_up(shares, costs, bins_per_rank)
    result = []
    for share in shares:
        own_lengths, own_costs = [lengths[i] for i in share], [costs[i] for i in share]
        own_tight = best_fit_decreasing(own_lengths, cap)
        own_bins = fit(own_lengths, own_costs, cap, bins_per_rank, own_tight)
        if own_bins is None:
            return None
        by_cost = sorted(own_bins, key=lambda group: (-sum(own_costs[i] for i in group), group))
        result.append([[share[i] for i in group] for group in by_cost])
    return result


def _top_up(shares: Bins, costs: Sequence[float], at_least: int) -> None:
    """Move the cheapest samples of the dearest shares, in place, until every share has `at_least` samples."""
    for poor in shares:
        while len(poor) < at_least:
            donor = max((share for share in shares if len(share) > at_least), key=lambda s: sum(costs[i] for i in s))
            cheapest = min(donor, key=lambda i: (costs[i], i))
            donor.remove(cheapest)
            poor.append(cheapest)


def fit(lengths: Sequence[int], costs: Sequence[float], cap: int, n_bins: int, tight: Bins) -> Bins | None:
    """Exactly `n_bins` bins under the cap, none empty: evenly spread, or else the bins of `tight` split up.

    None where neither gives so few; needs at least `n_bins` samples.
    """
    even = spread(lengths, costs, cap, n_bins)
    if even is not None:
        return even
    return split_to(tight, costs, n_bins) if len(tight) <= n_bins else None


def spread(lengths: Sequence[int], costs: Sequence[float], cap: int, n_bins: int) -> Bins | None:
    """Exactly `n_bins` bins of nearly equal cost: each sample, dearest first, to the cheapest bin it fits.

    None where a sample fits no bin, or finding one takes too long. Needs at least `n_bins` samples; then none is empty.
    """
    bins: Bins = [[] for _ in range(n_bins)]
    room = [cap] * n_bins
    heap = [(0.0, position) for position in range(n_bins)]
    patience = _SPREAD_PATIENCE * len(lengths)
    for sample in sorted(range(len(lengths)), key=lambda i: (-costs[i], i)):
        length = lengths[sample]
        too_full = []
        while heap and room[heap[0][1]] < length and bins[heap[0][1]]:
            too_full.append(heapq.heappop(heap))
        patience -= len(too_full)
        if not heap or patience < 0:
            return None
        cost, target = heap[0]
        heapq.heapreplace(heap, (cost + costs[sample], target))
        for entry in too_full:
            heapq.heappush(heap, entry)
        bins[target].append(sample)
        room[target] -= length
    return bins


def best_fit_decreasing(lengths: Sequence[int], cap: int) -> Bins:
    """Each sample, longest first, to the fullest bin that still has room; a new bin where none has."""
    bins: Bins = []
    by_room: list[tuple[int, int]] = []  # (room left, bin), sorted
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[sample]
        slot = bisect.bisect_left(by_room, (length, -1))
        if slot == len(by_room):
            bins.append([sample])
            target, room = len(bins) - 1, cap - length
        else:
            room, target = by_room.pop(slot)
            bins[target].append(sample)
            room -= length
        if room > 0:
            bisect.insort(by_room, (room, target))
    return bins


def split_to(bins: Bins, costs: Sequence[float], n_bins: int) -> Bins:
    """Split the dearest bins of two or more samples until there are `n_bins`; needs as many samples as that."""
    heap = [(-sum(costs[i] for i in group), order, group) for order, group in enumerate(bins)]
    heapq.heapify(heap)
    singles = []
    order = len(bins)
    while len(heap) + len(singles) < n_bins:
        entry = heapq.heappop(heap)
        if len(entry[2]) == 1:
            singles.append(entry)
            continue
        group = entry[2]
        halves = spread([0] * len(group), [costs[i] for i in group], 0, 2)
        for half in halves or []:
            members = [group[i] for i in half]
            heapq.heappush(heap, (-sum(costs[i] for i in members), order, members))
            order += 1
    return [group for _, _, group in sorted(heap + singles)]


def search(lengths: Sequence[int], cap: int, n_bins: int) -> Bins | None:
    """At most `n_bins` bins by branch and bound, longest sample first; None where none is found within the limit."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shortest = min(min(lengths), cap)
    rest = [0] * (len(order) + 1)
    for depth in reversed(range(len(order))):
        rest[depth] = rest[depth + 1] + min(lengths[order[depth]], cap)
    room: list[int] = []
    bins: Bins = []
    nodes = 0

    def place(depth: int) -> bool:
        nonlocal nodes
        nodes += 1
        if depth == len(order):
            return True
        # Room that not even the shortest sample fits is lost.
        usable = sum(free for free in room if free >= shortest)
        if nodes > _SEARCH_MAX_NODES or usable + (n_bins - len(bins)) * cap < rest[depth]:
            return False
        sample = order[depth]
        length = min(lengths[sample], cap)  # a longer sample fills a bin of its own
        tried = set()
        for target in range(len(bins)):
            if room[target] < length or room[target] in tried:
                continue
            tried.add(room[target])
            room[target] -= length
            bins[target].append(sample)
            if place(depth + 1):
                return True
            bins[target].pop()
            room[target] += length
        if len(bins) == n_bins:
            return False
        bins.append([sample])
        room.append(cap - length)
        if place(depth + 1):
            return True
        bins.pop()
        room.pop()
        return False

    return bins if place(0) else None


def deal(bins: Bins, costs: Sequence[float], ranks: int) -> list[Bins]:
    """Give every rank the same number of bins and nearly the same cost; `len(bins)` is a multiple of `ranks`.

    Dearest bins first, `ranks` at a time, the dearest of each round to the rank with the least so far: the
    ranks' totals are even, and so are the costs of the bins that the ranks work on at the same time.
    """
    bin_costs = [sum(costs[i] for i in group) for group in bins]
    order = sorted(range(len(bins)), key=lambda b: (-bin_costs[b], b))
    dealt: list[Bins] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for start in range(0, len(order), ranks):
        poorest_first = sorted(range(ranks), key=lambda rank: (totals[rank], rank))
        for rank, chosen in zip(poorest_first, order[start : start + ranks], strict=True):
            dealt[rank].append(bins[chosen])
            totals[rank] += bin_costs[chosen]
    return dealt
