"""A discrete-event model of a step with thousands of engines and training ranks, fitted to what was measured.

    python benchmarks/scale_model.py [--engines 8 64 ... 4096] [--gib 15.3] [--before]
    python benchmarks/scale_model.py --measured

Every process is a queue that does one piece of work at a time; events are calls, answers and transfers. The costs of a
call, a sample and a rank are fitted to the measurements at 64 engines or ranks (`Costs`, by scale.py, control_ranks.py
and engine_calls.py); network and storage are parameters (`Cluster`), not measurements. Engines have one GPU, there are
as many training ranks as engines, and every process has a core of its own. Per number of engines:

- start: seconds of the calls that connect ranks and engines, without imports and models
- driver, manager: their CPU in microseconds per sample; messages: HTTP requests and Ray calls per step
- control: seconds of a weight update without the weights
- seconds of a whole update by each transport, for `--gib` GiB of weights (15.3: 8B in bf16) in buckets of 512 MiB
- memory: of driver and manager together, more than without engines, in GiB

`--measured` compares the model with the measurements, of which those at 512 and more were not used for its costs.
"changes" are broadcast, "files" are changes in files. `--before` models the code whose driver passed all batches to
every rank and whose rank 0 made all calls, with changes in them.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Sequence

ENGINES_OF_ONE_RANK = 32  # as in weights.update.engine_fanout
GIB = 2**30
BUCKET = 512 * 2**20
CHANGED, IN_FILES = 0.032, 0.020  # of the bytes: changes at a learning rate of 1e-6, as xor in files (delta_updates.py)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of work, fitted at 64 engines or ranks on the machine of docs/performance.md (2 cores, 2026-11-28)."""

    rank_call: float = 370e-6  # an HTTP call of a training rank; its threads hold one interpreter lock
    engine_call: float = 70e-6  # of an engine that answers at once
    store_layout: float = 70e-6  # of the store of the training ranks, that one gets the layout of a bucket
    driver_call: float = 224e-6  # a Ray call of the driver, and its answer
    rank_answer: float = 578e-6  # of a control-only rank to a call with a batch
    manager_sample: float = 197e-6  # prompt to batch
    router_request: float = 120e-6
    driver_step: float = 0.010  # of the driver, whatever the numbers
    start_engine: float = 4.2e-3
    start_rank: float = 1.6e-3
    passed_reference: float = 12e-6  # a reference in the arguments of a Ray call, fitted at 512 ranks
    driver_rank_bytes: float = 106e3
    manager_sample_bytes: float = 21e3


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Bytes per second: the network of a GPU, a copy within a GPU's memory, and the shared storage of all.

    `host_read`: an engine's out of the checkpoint in its host's memory; `host` engines share a host.
    """

    network: float = 50e9
    gpu_copy: float = 1e12
    storage_write: float = 2e9
    storage_read: float = 100e9
    host_read: float = 10e9
    host: int = 8


class Simulation:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Calls `event` in so many seconds."""
        heapq.heappush(self._events, (self.now + seconds, next(self._serial), event))

    def run(self) -> float:
        """Handles all events; returns the time of the last one."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self.now


class Queue:
    """`servers` workers, each doing one piece of work at a time, in the order of arrival."""

    def __init__(self, simulation: Simulation, servers: int = 1) -> None:
        self._simulation = simulation
        self._free = [0.0] * servers
        self.busy = 0.0

    def do(self, seconds: float, then: Callable[[], None] = lambda: None) -> None:
        """Works for so many seconds as soon as a worker is free, then calls `then`."""
        begins = max(heapq.heappop(self._free), self._simulation.now)
        heapq.heappush(self._free, begins + seconds)
        self.busy += seconds
        self._simulation.after(begins + seconds - self._simulation.now, then)


def calls_of_ranks(shares: Sequence[int], costs: Costs, rounds: int) -> float:
    """Seconds until each rank has called its share of engines `rounds` times."""
    simulation = Simulation()
    for share in shares:
        _one_rank(simulation, Queue(simulation), share, costs, rounds)
    return simulation.run()


def _one_rank(simulation: Simulation, rank: Queue, share: int, costs: Costs, rounds: int) -> None:
    left = share

    def answered() -> None:
        nonlocal left
        left -= 1
        if left == 0 and rounds > 1:  # the next call only after every answer
            _one_rank(simulation, rank, share, costs, rounds - 1)

    for _ in range(share):
        engine = Queue(simulation)
        rank.do(costs.rank_call, lambda engine=engine: engine.do(costs.engine_call, answered))  # type: ignore[misc]


def call_to_ranks(ranks: int, costs: Costs, *, references: int = 1, one_process: bool = False) -> tuple[float, float]:
    """(seconds, the driver's CPU) of a call with so many batches to every rank.

    `one_process`: one core answers for all ranks, as in control_ranks.py.
    """
    simulation = Simulation()
    driver, shared = Queue(simulation), Queue(simulation)
    work = costs.driver_call + costs.passed_reference * (references - 1)
    for _ in range(ranks):
        rank = shared if one_process else Queue(simulation)
        driver.do(work, lambda rank=rank: rank.do(costs.rank_answer))  # type: ignore[misc]
    return simulation.run(), driver.busy


def rollout(samples: int, costs: Costs) -> float:
    """Seconds until the router has forwarded all requests of the manager to engines that answer at once."""
    simulation = Simulation()
    manager, router = Queue(simulation), Queue(simulation)
    for _ in range(samples):
        manager.do(costs.manager_sample, lambda: router.do(costs.router_request))
    return simulation.run()


@dataclasses.dataclass(frozen=True)
class Step:
    """One number of engines and ranks."""

    engines: int
    start_s: float
    driver_us: float
    manager_us: float
    messages: int
    control_s: float
    updates: dict[str, float]
    memory_gib: float


def shares_of(engines: int, ranks: int, *, before: bool) -> list[int]:
    """The engines that each rank calls."""
    callers = 1 if before else max(min(ranks, -(-engines // ENGINES_OF_ONE_RANK)), 1)
    return [len(range(rank, engines, callers)) for rank in range(callers)]


def updates(
    engines: int, weights: float, control: float, loads: float, announcers: Sequence[int], *, before: bool
) -> dict[str, float]:
    """Seconds of a weight update by each transport; `loads` are those of the calls that make engines read files.

    `announcers` are the engines that each rank tells of a bucket of a broadcast.
    """
    costs, cluster = Costs(), Cluster()
    by_zero = calls_of_ranks([engines], costs, rounds=1)  # one call of rank 0 to every engine
    announced = calls_of_ranks(announcers, costs, rounds=1) + costs.store_layout * (len(announcers) - 1)
    buckets = math.ceil(weights / BUCKET)
    files = weights / cluster.storage_write + engines * weights / cluster.storage_read
    hosts, changed = math.ceil(engines / cluster.host), IN_FILES * weights
    changed_files = changed / cluster.storage_write + hosts * changed / cluster.storage_read
    changes = buckets * max(announced, 2 * CHANGED * BUCKET / cluster.network)
    if before:  # in the calls of rank 0 to every engine, as base64
        changes = max(buckets * by_zero, engines * CHANGED * 4 / 3 * weights / cluster.network)
    return {
        "shared": control + buckets * (costs.rank_call + costs.engine_call) + weights / cluster.gpu_copy,
        "broadcast": control + buckets * max(announced, 2 * BUCKET / cluster.network),
        "p2p": control + by_zero + weights / cluster.network,
        "changes": control + changes,
        "disk": control + loads + files,
        "files": control + loads + changed_files + weights / cluster.host_read,
    }


def model(engines: int, weights: float, samples_per_engine: int, *, before: bool) -> Step:
    """A step on a cluster."""
    costs, ranks, samples = Costs(), engines, samples_per_engine * engines
    shares = shares_of(engines, ranks, before=before)
    control = calls_of_ranks(shares, costs, rounds=6)  # stop, flush; flush, version, its check; continue
    loads = calls_of_ranks(shares, costs, rounds=1)
    _, train = call_to_ranks(ranks, costs, references=ranks if before else 1)
    _, other = call_to_ranks(ranks, costs)
    return Step(
        engines,
        ranks * costs.start_rank + engines * costs.start_engine,
        1e6 * (costs.driver_step + train + 2 * other) / samples,  # training, weight update, memory
        1e6 * rollout(samples, costs) / samples,
        7 * engines + 2 * samples + 3 * ranks,
        control,
        updates(engines, weights, control, loads, shares, before=before),
        (ranks * costs.driver_rank_bytes + samples * costs.manager_sample_bytes) / GIB,
    )


# seconds, 2026-11-28: stop and commit by one rank (engine_calls.py), a rollout of 8 samples per engine (scale.py), and
# a call with a batch to every rank (control_ranks.py)
CALLS = {8: 0.018, 64: 0.142, 512: 1.052, 2048: 3.687, 4096: 9.346}
ROLLOUTS = {8: 0.017, 64: 0.101, 512: 0.990}
TRAIN = {8: 0.007, 64: 0.037, 512: 0.347, 4096: 3.368}


def compare() -> None:
    """The model beside the measurements."""
    costs = Costs()
    modelled: dict[str, tuple[dict[int, float], Callable[[int], float]]] = {
        "calls to engines": (CALLS, lambda engines: calls_of_ranks([engines], costs, rounds=6)),
        "rollout": (ROLLOUTS, lambda engines: rollout(8 * engines, costs)),
        "calls to ranks": (TRAIN, lambda ranks: call_to_ranks(ranks, costs, one_process=True)[0]),
    }
    print(f"{'':>16}{'number':>8}{'measured s':>12}{'model s':>10}{'ratio':>8}")
    for name, (measured, predict) in modelled.items():
        for number, seconds in measured.items():
            found = predict(number)
            print(f"{name:>16}{number:>8}{seconds:>12.3f}{found:>10.3f}{found / seconds:>8.2f}")


def main() -> None:
    """Reads the flags and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 64, 512, 1024, 2048, 4096])
    parser.add_argument("--gib", type=float, default=15.3, help="of the weights")
    parser.add_argument("--samples-per-engine", type=int, default=8)
    parser.add_argument("--measured", action="store_true", help="compare with the measurements")
    parser.add_argument("--before", action="store_true", help="the code before the changes")
    options = parser.parse_args()
    if options.measured:
        compare()
        return
    names = ("engines", "start s", "driver us", "manager us", "messages", "control s")
    size = options.gib * GIB
    found = [model(n, size, options.samples_per_engine, before=options.before) for n in options.engines]
    print("".join(f"{name:>12}" for name in (*names, *found[0].updates, "memory GiB")))
    for one in found:
        print(f"{one.engines:>12}{one.start_s:>12.2f}{one.driver_us:>12.0f}{one.manager_us:>12.0f}", end="")
        print(f"{one.messages:>12}{one.control_s:>12.3f}", end="")
        print("".join(f"{seconds:>12.2f}" for seconds in one.updates.values()) + f"{one.memory_gib:>12.2f}")


if __name__ == "__main__":
    main()
