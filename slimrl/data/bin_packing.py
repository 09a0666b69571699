"""Bin packing of plain integers: assigns samples to micro-batches and micro-batches to ranks.

Pure and deterministic: equal input gives equal output, ties are broken by position. Uses no tensors. `train_batch.py`
calls it.

A *row* is the k-th bin of every rank: ranks that exchange data in every layer process it in lockstep, and all of them
wait for its costliest bin.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from itertools import accumulate

Bins = list[list[int]]  # positions of the samples in each bin

# Branch-and-bound is for small inputs, where a single bin matters; the limits keep it to milliseconds.
_SEARCH_MAX_SAMPLES = 64
_SEARCH_MAX_NODES = 20_000
# Attempts to fill bins one by one: the fraction of the spare capacity that is withheld, and the number of pairs tried
# for each gap. Which number of pairs packs best depends on the input.
_ATTEMPTS = ((0.9, 8), (0.5, 8), (0.0, 8), (0.0, 32), (0.0, 128))
# Imbalance of the ranks' total costs that is accepted; above it, rows may become uneven to reduce it.
_TOLERATED_IMBALANCE = 0.005


def lower_bound(lengths: Sequence[int], cap: int) -> int:
    """A lower bound on the number of bins under `cap`.

    A sample longer than the cap gets its own bin; at most k samples longer than cap / (k + 1) share a bin. For any size
    s, a sample longer than cap - s leaves no room for samples of size s or more, so that those need other bins: the
    bound L2 of Martello and Toth, "Knapsack Problems" (1990), chapter 8.
    """
    short = sorted(length for length in lengths if length <= cap)
    volume = [0, *accumulate(short)]
    half = bisect.bisect_right(short, cap / 2)
    needed = max(-(-(len(short) - bisect.bisect_right(short, cap / (k + 1))) // k) for k in range(1, 16))
    for size in {0, *short[:half]}:
        least, full = bisect.bisect_left(short, size), bisect.bisect_right(short, cap - size)
        free = (full - half) * cap - (volume[full] - volume[half])
        middle = volume[half] - volume[least]
        needed = max(needed, len(short) - half + max(0, -(-(middle - free) // cap)))
    return len(lengths) - len(short) + needed


def pack(lengths: Sequence[int], costs: Sequence[float], cap: int, ranks: int, group: int = 1) -> list[Bins]:
    """Bins of at most `cap` tokens for each rank: as few as the search finds, none empty.

    The number of bins is the same on every rank and a multiple of `group`.

    A sample longer than the cap gets its own bin. `costs` are balanced over the ranks, in total and in each row, as far
    as the cap allows. Bins are sorted by descending cost.

    Raises ValueError if there are fewer samples than bins.
    """
    unit = ranks * group
    n_bins = -(-max(lower_bound(lengths, cap), 1) // unit) * unit
    while n_bins <= len(lengths):
        dealt = even_rows(lengths, costs, cap, ranks, n_bins // ranks)
        if dealt is not None:
            return dealt
        tight = best_fit(lengths, cap, n_bins)
        if len(tight) <= n_bins:
            return deal(split_to(tight, costs, n_bins), costs, ranks)
        # Skip bin counts below the best fit, unless the search may still find one.
        n_bins = n_bins + unit if len(lengths) <= _SEARCH_MAX_SAMPLES else -(-len(tight) // unit) * unit
    in_groups = "" if group == 1 else f" in groups of {group}"
    raise ValueError(
        f"{len(lengths)} samples cannot fill {n_bins} micro-batches ({n_bins // ranks}{in_groups} on each of {ranks}"
        f" data-parallel ranks, at most {cap} tokens each): make --global-batch-size a multiple of the ranks"
        + (" x that group" if group > 1 else "")
    )


def even_rows(lengths: Sequence[int], costs: Sequence[float], cap: int, ranks: int, rows: int) -> list[Bins] | None:
    """Exactly `rows` bins for each rank, of nearly equal cost in each row; None if the samples do not fit.

    Ranks with a sample costlier than the fair share of a bin get more work in that row. Two schedules are compared: all
    further rows even, or the last row lighter on these ranks. The result is the one with the lower mean idle time over
    two cases: ranks that synchronize after every row, and only at the end.
    """
    top, fair = row_targets(costs, ranks, rows)
    top_targets = [target for target in top for _ in range(ranks)]
    n_top, left = len(top_targets), rows - len(top)
    level = spread(lengths, costs, cap, top_targets + [fair] * (ranks * left))
    if level is None:
        return None
    first = deal(level, costs, ranks)
    if not top or not left or imbalance(first, costs) <= _TOLERATED_IMBALANCE:
        return first
    # Second schedule: the same top rows, with some bins of the last row lighter. `deal` gives these to the ranks with
    # the highest cost, which brings their totals close to the mean.
    top_costs, total = bin_costs(level[:n_top], costs), sum(costs)
    owners = assign(top_costs, ranks)
    spent = [sum(cost for cost, owner in zip(top_costs, owners, strict=True) if owner == rank) for rank in range(ranks)]
    shares = fill_up(spent, (1 + _TOLERATED_IMBALANCE) * total / ranks, total - sum(spent))
    fair = max(shares) / left
    last = [share - fair * (left - 1) for share in shares]
    leaning = spread(lengths, costs, cap, top_targets + [fair] * (ranks * (left - 1)) + last)
    if leaning is None:
        return first
    second = deal(leaning, costs, ranks)
    return min(first, second, key=lambda dealt: lockstep_idle(dealt, costs) + imbalance(dealt, costs))


def row_targets(costs: Sequence[float], ranks: int, rows: int) -> tuple[list[float], float]:
    """Target costs of the bins in each top row, and in all other rows.

    A top row has a sample costlier than the fair share, whose cost is the row's target. Rows take the samples in order
    of descending cost, one per bin.
    """
    costliest_first = sorted(costs, reverse=True)
    rest = sum(costs)
    top: list[float] = []
    for row in range(rows):
        bins_left = (rows - row) * ranks
        costliest = costliest_first[row * ranks]
        if costliest * bins_left <= rest:
            return top, rest / bins_left
        top.append(costliest)
        rest -= costliest * ranks
    return top, 0.0


def fill_up(spent: Sequence[float], limit: float, rest: float) -> list[float]:
    """Shares that sum to `rest`, with the smallest maximum, and no `spent[i] + share[i]` above `limit`.

    The share is 0 if `spent[i]` exceeds the limit already. `rest` must fit under the limits.
    """
    rooms = [max(limit - amount, 0.0) for amount in spent]
    level = 0.0
    for position, room in enumerate(sorted(rooms)):
        level = rest / (len(rooms) - position)
        if room >= level:
            break
        rest -= room
    return [min(level, room) for room in rooms]


def spread(lengths: Sequence[int], costs: Sequence[float], cap: int, targets: Sequence[float]) -> Bins | None:
    """One bin per target: puts each sample, costliest first, into the bin with room that is furthest below its target.

    None if a sample fits no bin. Needs at least as many samples as bins; then none is empty.
    """
    bins: Bins = [[] for _ in targets]
    room = [cap] * len(targets)
    empty = set(range(len(targets)))
    lacking = [(-target, position) for position, target in enumerate(targets)]
    heapq.heapify(lacking)
    too_full: list[tuple[int, tuple[float, int]]] = []  # (-room, entry of `lacking`): until a shorter sample comes
    order = sorted(range(len(lengths)), key=lambda i: (-costs[i], i))
    for placed, sample in enumerate(order):
        length = lengths[sample]
        if len(empty) == len(order) - placed:  # one for each empty bin
            for target, last in zip(sorted(empty), order[placed:], strict=True):
                bins[target].append(last)
            break
        while too_full and -too_full[0][0] >= length:
            heapq.heappush(lacking, heapq.heappop(too_full)[1])
        while lacking and room[lacking[0][1]] < length and bins[lacking[0][1]]:
            entry = heapq.heappop(lacking)
            heapq.heappush(too_full, (-room[entry[1]], entry))
        if not lacking:
            return None
        value, target = lacking[0]
        heapq.heapreplace(lacking, (value + costs[sample], target))
        empty.discard(target)
        bins[target].append(sample)
        room[target] -= length
    return bins


def best_fit(lengths: Sequence[int], cap: int, n_bins: int) -> Bins:
    """At most `n_bins` bins regardless of cost, or as few as were found.

    The first attempts withhold most of the spare capacity, so that it does not all end up in the last bins.
    """
    spare = n_bins * cap - sum(min(length, cap) for length in lengths)
    found = []
    for withheld, width in _ATTEMPTS:
        found.append(greedy_fill(lengths, cap - int(withheld * spare / n_bins), width))
        if len(found[-1]) <= n_bins:
            return found[-1]
    searched = search(lengths, cap, n_bins) if len(lengths) <= _SEARCH_MAX_SAMPLES else None
    return min(found, key=len) if searched is None else searched


def greedy_fill(lengths: Sequence[int], cap: int, width: int) -> Bins:
    """Fills one bin after another: the longest remaining sample, then the one or two that leave the smallest gap.

    `width` pairs are tried, starting with samples of about half the gap: these are frequent, and short samples, which
    fit any gap, remain for the last bins.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], -i))
    left = [lengths[i] for i in order]  # ascending; `order` has their positions
    bins = []
    while left:
        bins.append([order.pop()])
        gap = cap - left.pop()
        while left and left[0] <= gap:
            for chosen in _best_fit(left, gap, width):
                bins[-1].append(order.pop(chosen))
                gap -= left.pop(chosen)
    return bins


def _best_fit(left: list[int], gap: int, width: int) -> tuple[int, ...]:
    """Indices of the one or two entries of the ascending `left` that fill `gap` best; of two, the later one first."""
    single = bisect.bisect_right(left, gap) - 1
    chosen: tuple[int, ...]
    best, chosen = left[single], (single,)
    if best == gap or 2 * left[-1] < gap:  # no two entries fill the gap: take the longest
        return chosen
    middle = bisect.bisect_left(left, gap - gap // 2)
    for longer in range(middle, min(middle + width, single + 1)):
        shorter = min(bisect.bisect_right(left, gap - left[longer]), longer) - 1
        if shorter < 0:
            continue
        if left[longer] + left[shorter] > best:
            best, chosen = left[longer] + left[shorter], (longer, shorter)
            if best == gap:
                break
    return chosen


def split_to(bins: Bins, costs: Sequence[float], n_bins: int) -> Bins:
    """Splits the costliest bins of two or more samples until there are `n_bins`; needs at least `n_bins` samples."""
    heap = [(-sum(costs[i] for i in group), order, group) for order, group in enumerate(bins)]
    heapq.heapify(heap)
    singles: list[tuple[float, int, list[int]]] = []
    order = len(bins)
    while len(heap) + len(singles) < n_bins:
        entry = heapq.heappop(heap)
        if len(entry[2]) == 1:
            singles.append(entry)
            continue
        group = entry[2]
        halves = spread([0] * len(group), [costs[i] for i in group], 0, [0.0, 0.0])
        for half in halves or []:
            members = [group[i] for i in half]
            heapq.heappush(heap, (-sum(costs[i] for i in members), order, members))
            order += 1
    return [group for _, _, group in sorted(heap + singles)]


def search(lengths: Sequence[int], cap: int, n_bins: int) -> Bins | None:
    """At most `n_bins` bins by branch and bound, longest sample first; None if none is found within the node limit."""
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
        # Room too small for the shortest sample is unusable.
        usable = sum(free for free in room if free >= shortest)
        if nodes > _SEARCH_MAX_NODES or usable + (n_bins - len(bins)) * cap < rest[depth]:
            return False
        sample = order[depth]
        length = min(lengths[sample], cap)  # a longer sample gets its own bin
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
    """Assigns every rank the same number of bins and nearly the same cost; `len(bins)` is a multiple of `ranks`."""
    return by_owner(bins, assign(bin_costs(bins, costs), ranks), costs, ranks)


def assign(bin_costs: Sequence[float], ranks: int) -> list[int]:
    """The rank of each bin.

    Assigns the costliest bins first, `ranks` per round, the costliest of each round to the rank with the lowest total:
    this balances the ranks' totals, and the costs of the bins that the ranks process at the same time.
    """
    order = sorted(range(len(bin_costs)), key=lambda b: (-bin_costs[b], b))
    owners = [0] * len(bin_costs)
    totals = [0.0] * ranks
    for start in range(0, len(order), ranks):
        lightest_first = sorted(range(ranks), key=lambda rank: (totals[rank], rank))
        for rank, chosen in zip(lightest_first, order[start : start + ranks], strict=True):
            owners[chosen] = rank
            totals[rank] += bin_costs[chosen]
    return owners


def by_owner(bins: Bins, owners: Sequence[int], costs: Sequence[float], ranks: int) -> list[Bins]:
    """The bins of each rank, by descending cost."""
    cost_of = bin_costs(bins, costs)
    dealt: list[Bins] = [[] for _ in range(ranks)]
    for position in sorted(range(len(bins)), key=lambda b: (-cost_of[b], b)):
        dealt[owners[position]].append(bins[position])
    return dealt


def bin_costs(bins: Bins, costs: Sequence[float]) -> list[float]:
    """The cost of each bin."""
    return [sum(costs[i] for i in samples) for samples in bins]


def lockstep_idle(dealt: list[Bins], costs: Sequence[float]) -> float:
    """Idle time of ranks that synchronize after every row, relative to the mean rank's work."""
    rows = list(zip(*(bin_costs(bins, costs) for bins in dealt), strict=True))
    idle: float = sum(max(row) for row in rows) * len(dealt) / sum(sum(row) for row in rows) - 1
    return idle


def imbalance(dealt: list[Bins], costs: Sequence[float]) -> float:
    """Idle time of ranks that synchronize after their last bin, relative to the mean rank's work."""
    totals = [sum(bin_costs(bins, costs)) for bins in dealt]
    return max(totals) * len(dealt) / sum(totals) - 1


def fixed_size(rows: range, costs: Sequence[float], size: int, ranks: int, balance: bool) -> list[Bins]:
    """Micro-batches of `size` rows; with `balance`, of rows of similar cost, so that `deal` can even out the ranks."""
    if not balance:
        return _in_order([list(rows[start : start + size]) for start in range(0, len(rows), size)], ranks)
    order = sorted(rows, key=lambda row: (-costs[row], row))
    return deal([sorted(order[start : start + size]) for start in range(0, len(order), size)], costs, ranks)


def under_cap(
    rows: range, lengths: Sequence[int], costs: Sequence[float], cap: int, ranks: int, group: int, balance: bool
) -> list[Bins]:
    """As few micro-batches under the cap as the search finds; rows ascending in each.

    Without `balance` they are assigned round-robin, in the order of their first rows: contiguous runs would give the
    last rank all of the longest samples, which have a micro-batch each.
    """
    packed = pack([lengths[row] for row in rows], [costs[row] for row in rows], cap, ranks, group)
    dealt = [[sorted(rows[position] for position in group) for group in rank] for rank in packed]
    if balance:
        return dealt
    in_order = sorted(group for rank in dealt for group in rank)
    return [in_order[rank::ranks] for rank in range(ranks)]


def _in_order(groups: Bins, ranks: int) -> list[Bins]:
    """The micro-batches sorted by first row, an equal run of them to each rank."""
    groups = sorted(groups)
    share = len(groups) // ranks
    return [groups[rank * share : (rank + 1) * share] for rank in range(ranks)]
