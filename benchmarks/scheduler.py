"""Balance of the micro-batches of a long-tailed batch, and the time to plan them, compared with other schedulers.

    OMP_NUM_THREADS=1 python benchmarks/scheduler.py [--samples 4096] [--ranks 64] [--cap 16384] [--seeds 4]

Lengths are log-normal (medians of 2000, 3000 and 4000 tokens, sigma of 0.8, 1.0 and 1.2), clipped at the cap; a sample
costs length + length^2 / 32768. Printed for each scheduler, over all these batches:

above cap     micro-batches above the cap of tokens, largest number
micro-batches their number / the lower bound, rounded up to the same number for every rank
lockstep      time lost by ranks that wait for each other after every micro-batch: sum of maxima / sum of means
imbalance     time lost by ranks that wait only at the end: costliest rank / mean rank
ms            CPU time of one core, median of three interleaved rounds
step time     time of ranks in lockstep, relative to this package's schedule

The others are implemented below: first fit in the order of arrival; the Karmarkar-Karp differencing method with equal
numbers of samples per rank, followed by first fit or by itself; and sorted samples assigned round-robin. Target: none
above the cap, at the lower bound, lockstep <= 2 %, imbalance <= 1 %, <= 60 ms; `least` is a lower bound on the loss of
any schedule of these batches.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import heapq
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from ratios import add_json_option, write_ratios

from slimrl.data import bin_packing
from slimrl.data.batch_schedule import DEFAULT_BREAK_EVEN_TOKENS

ROUNDS = 3
Schedule = list[bin_packing.Bins]  # [rank][micro-batch] -> samples
Scheduler = Callable[[Sequence[int], Sequence[float], int, int], Schedule]


def first_fit(samples: Sequence[int], lengths: Sequence[int], cap: int) -> bin_packing.Bins:
    """Each sample to the first micro-batch with room."""
    groups: bin_packing.Bins = []
    rooms: list[int] = []
    for sample in samples:
        for position, room in enumerate(rooms):
            if lengths[sample] <= room:
                groups[position].append(sample)
                rooms[position] -= lengths[sample]
                break
        else:
            groups.append([sample])
            rooms.append(cap - lengths[sample])
    return groups


def differencing(start: list[list[tuple[float, list[int]]]]) -> bin_packing.Bins:
    """Karmarkar-Karp: join the two most uneven partial solutions, the costliest part of one with the other's cheapest.

    A partial solution is a list of (cost, samples), costliest first.
    """
    order = itertools.count()
    heap = [(-(parts[0][0] - parts[-1][0]), next(order), parts) for parts in start]
    heapq.heapify(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        pairs = zip(one, reversed(other), strict=True)
        joined = sorted(((a + b, own + more) for (a, own), (b, more) in pairs), key=lambda part: -part[0])
        heapq.heappush(heap, (-(joined[0][0] - joined[-1][0]), next(order), joined))
    return [samples for _, samples in heap[0][2]]


def equal_counts(costs: Sequence[float], parts: int) -> bin_packing.Bins:
    """Karmarkar-Karp into `parts` with equal numbers of samples."""
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    starts = range(0, len(order), parts)
    return differencing([[(costs[i], [i]) for i in order[start : start + parts]] for start in starts])


def in_order(lengths: Sequence[int], costs: Sequence[float], cap: int, ranks: int) -> Schedule:
    """Each rank gets a contiguous run of samples, then first fit."""
    share = len(lengths) // ranks
    return [first_fit(range(rank * share, (rank + 1) * share), lengths, cap) for rank in range(ranks)]


def dealt_in_turn(lengths: Sequence[int], costs: Sequence[float], cap: int, ranks: int) -> Schedule:
    """Samples sorted by length and assigned round-robin, then first fit."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return [first_fit(order[rank::ranks], lengths, cap) for rank in range(ranks)]


def differenced(lengths: Sequence[int], costs: Sequence[float], cap: int, ranks: int) -> Schedule:
    """Karmarkar-Karp over the ranks, then first fit in the order of arrival."""
    return [first_fit(sorted(share), lengths, cap) for share in equal_counts(costs, ranks)]


def differenced_twice(lengths: Sequence[int], costs: Sequence[float], cap: int, ranks: int) -> Schedule:
    """Karmarkar-Karp over the ranks, and on each over as many micro-batches as first fit needs where it needs most."""
    shares = equal_counts(costs, ranks)
    count = max(len(first_fit(sorted(share), lengths, cap)) for share in shares)
    empty: list[tuple[float, list[int]]] = [(0.0, [])] * (count - 1)
    return [differencing([[(costs[i], [i]), *empty] for i in share]) for share in shares]


SCHEDULERS: dict[str, Scheduler] = {
    "slimrl": bin_packing.pack,
    "first fit in order of arrival": in_order,
    "sorted, dealt in turn, first fit": dealt_in_turn,
    "Karmarkar-Karp, first fit": differenced,
    "Karmarkar-Karp twice": differenced_twice,
}


@dataclasses.dataclass(frozen=True)
class Quality:
    """The figures of one schedule, as in the module's docstring."""

    above_cap: int
    micro_batches: float
    lockstep: float
    imbalance: float
    milliseconds: float


def judge(schedule: Schedule, lengths: Sequence[int], costs: Sequence[float], cap: int, milliseconds: float) -> Quality:
    """Computed independently of the scheduler; a rank with fewer micro-batches waits."""
    ranks = len(schedule)
    if sorted(i for rank in schedule for group in rank for i in group) != list(range(len(lengths))):
        raise ValueError("a schedule must hold every sample once")
    above = sum(len(group) > 1 and sum(lengths[i] for i in group) > cap for rank in schedule for group in rank)
    table = [sorted((sum(costs[i] for i in group) for group in rank), reverse=True) for rank in schedule]
    rows = list(itertools.zip_longest(*table, fillvalue=0.0))
    return Quality(
        above_cap=above,
        micro_batches=len(rows) / -(-bin_packing.lower_bound(lengths, cap) // ranks),
        lockstep=sum(max(row) for row in rows) * ranks / sum(costs) - 1,
        imbalance=max(map(sum, table)) * ranks / sum(costs) - 1,
        milliseconds=milliseconds,
    )


def least_lockstep(lengths: Sequence[int], costs: Sequence[float], cap: int, ranks: int) -> float:
    """Lower bound on the lockstep loss: that of the row of the costliest sample if all other rows were even.

    The bins of that row cost no more than the costliest ones that begin with the longest samples, one each.
    """
    dearest, best = max(costs), 0.0
    for length in sorted(lengths, reverse=True)[:ranks]:
        whole, rest = divmod(cap, length)
        best += min(dearest, cap + (whole * length**2 + rest**2) / DEFAULT_BREAK_EVEN_TOKENS)
    return max(0.0, dearest * ranks - best) / sum(costs)


def main() -> None:
    """Measures and prints one line per scheduler."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--cap", type=int, default=16384)
    parser.add_argument("--seeds", type=int, default=4)
    add_json_option(parser)
    options = parser.parse_args()
    found: dict[str, list[Quality]] = {name: [] for name in SCHEDULERS}
    least: list[float] = []
    schedules: dict[str, Schedule] = {}
    for median, sigma, seed in itertools.product((2000, 3000, 4000), (0.8, 1.0, 1.2), range(options.seeds)):
        drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, options.samples)
        lengths = np.clip(drawn.round(), 16, options.cap).astype(int).tolist()
        costs = [length + length**2 / DEFAULT_BREAK_EVEN_TOKENS for length in lengths]
        least.append(least_lockstep(lengths, costs, options.cap, options.ranks))
        times: dict[str, list[float]] = {name: [] for name in SCHEDULERS}
        for _ in range(ROUNDS):
            for name, scheduler in SCHEDULERS.items():
                gc.collect()  # so that no scheduler pays for another's garbage
                started = time.process_time()
                schedules[name] = scheduler(lengths, costs, options.cap, options.ranks)
                times[name].append((time.process_time() - started) * 1000)
        for name, schedule in schedules.items():
            found[name].append(judge(schedule, lengths, costs, options.cap, statistics.median(times[name])))
    print(
        f"{len(least)} batches of {options.samples} samples, {options.ranks} ranks, cap {options.cap}: median (worst)"
    )
    print(f"{'':33}above cap  micro-batches  lockstep loss     imbalance         ms           step time")
    for name, qualities in found.items():
        print_line(name, qualities, found["slimrl"])
    print(f"{'least possible':57}{_percents(least)}")
    others = {name: qualities for name, qualities in found.items() if name != "slimrl"}
    ratios = {f"step time of {name} / slimrl": step_time(other, found["slimrl"]) for name, other in others.items()}
    write_ratios(options.json, ratios)


def step_time(qualities: list[Quality], own: list[Quality]) -> float:
    """Time of ranks in lockstep relative to that of `own`, the median over all batches."""
    pairs = zip(qualities, own, strict=True)
    return statistics.median((1 + other.lockstep) / (1 + ours.lockstep) for other, ours in pairs)


def print_line(name: str, qualities: list[Quality], own: list[Quality]) -> None:
    """The figures of one scheduler over all batches."""
    times = [quality.milliseconds for quality in qualities]
    print(
        f"{name:33}{max(quality.above_cap for quality in qualities):9}"
        f"{max(quality.micro_batches for quality in qualities):15.3f}"
        f"{_percents([quality.lockstep for quality in qualities])}{_percents([q.imbalance for q in qualities])}"
        f"{statistics.median(times):7.0f} ({max(times):.0f})".ljust(102)
        + f"{step_time(qualities, own):6.2f} x"
    )


def _percents(values: list[float]) -> str:
    return f"{statistics.median(values) * 100:7.2f} ({max(values) * 100:.2f}) %".rjust(18)


if __name__ == "__main__":
    main()
