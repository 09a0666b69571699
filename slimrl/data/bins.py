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


def lower_bound(lengths: Sequence[int], cap: int) -> int:
    """No packing under `cap` has fewer bins: full bins for the short samples, one for each longer than the cap.

    Also counts samples over half the cap, no two of which can share a bin.
    """
    short = [length for length in lengths if length <= cap]
    over = len(lengths) - len(short)
    by_volume = -(-sum(short) // cap)
    by_size = sum(1 for length in short if 2 * length > cap)
    return over + max(by_volume, by_size)


def pack(lengths: Sequence[int], costs: Sequence[float], cap: int, multiple: int) -> Bins:
    """Bins of at most `cap` tokens, their number the smallest multiple of `multiple` that is found, none empty.

    A sample longer than the cap has a bin of its own. `costs` are evened out over the bins where the cap
    leaves room. Tries, for each number of bins from the lower bound up: even spreading, best-fit
    decreasing, and (small inputs only) an exact search.

    Raises ValueError where there are fewer samples than bins needed.
    """
    n_bins = -(-max(lower_bound(lengths, cap), 1) // multiple) * multiple
    tight = best_fit_decreasing(lengths, cap)
    while True:
        if n_bins > len(lengths):
            raise ValueError(
                f"{len(lengths)} samples cannot fill {n_bins} micro-batches (a multiple of {multiple} ranks, at most"
                f" {cap} tokens each): raise --max-tokens-per-gpu, or make --global-batch-size a multiple of the ranks"
            )
        even = spread(lengths, costs, cap, n_bins)
        if even is not None:
            return even
        if len(tight) <= n_bins:
            return split_to(tight, costs, n_bins)
        exact = search(lengths, cap, n_bins) if len(lengths) <= _SEARCH_MAX_SAMPLES else None
        if exact is not None:
            return split_to(exact, costs, n_bins)
        n_bins += multiple


def spread(lengths: Sequence[int], costs: Sequence[float], cap: int, n_bins: int) -> Bins | None:
    """Exactly `n_bins` bins of nearly equal cost: each sample, dearest first, to the cheapest bin it fits.

    None where a sample fits no bin. Needs at least `n_bins` samples; then no bin stays empty.
    """
    bins: Bins = [[] for _ in range(n_bins)]
    room = [cap] * n_bins
    heap = [(0.0, position) for position in range(n_bins)]
    for sample in sorted(range(len(lengths)), key=lambda i: (-costs[i], i)):
        length = lengths[sample]
        too_full = []
        while heap and room[heap[0][1]] < length and bins[heap[0][1]]:
            too_full.append(heapq.heappop(heap))
        if not heap:
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
        if nodes > _SEARCH_MAX_NODES or sum(room) + (n_bins - len(bins)) * cap < rest[depth]:
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
