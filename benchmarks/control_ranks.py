"""What more training ranks cost the driver: its real calls and waits, to ranks without a model.

    OMP_NUM_THREADS=1 python benchmarks/control_ranks.py [--ranks 8 64 512 4096] [--engines 8] [--steps 5]

Every rank is an entry of the real `TrainGroup` and a watch of the real `Supervisor`, and takes every control call of a
run over Ray: start, connection to the engines, then in each step a batch of its own from Ray's object store, the weight
update, and the memory report. A rank answers at once; `--processes` actor processes stand for all of them. So what is
left is the driver. Prints, per number of ranks:

- start: seconds from the first call to the end of `connect_engines`, with `--engines` endpoints
- train, update, memory: seconds of these calls in a step, medians
- calls: remote calls of the driver per step
- driver us: CPU of the driver per step and rank in microseconds (Ray's threads in it included)
- driver MiB: resident memory of the driver more than before the ranks

The ranks share this machine's cores with the driver, so that seconds include their own work.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from slimrl.arguments import Arguments  # noqa: E402
from slimrl.cluster.supervisor import Supervisor  # noqa: E402
from slimrl.cluster.training.train_group import TrainGroup  # noqa: E402
from slimrl.cluster.training.train_messages import POLICY, TrainReady  # noqa: E402
from slimrl.cluster.watchdog import WatchdogConfig, poll_actors  # noqa: E402
from slimrl.processes.process_info import resident_gib  # noqa: E402
from slimrl.weights.update.topology import EngineEndpoint  # noqa: E402

BATCH_BYTES = 65536
REPORT = {"bytes": 1.0, "seconds": 1.0, "check_seconds": 0.0}


@ray.remote(num_cpus=0, max_concurrency=100_000)
class ControlRank:
    """Any number of training ranks that take the calls of `TrainWorker` and compute nothing."""

    def __init__(self) -> None:
        self._started = 0

    async def watch(self) -> None:
        """Pending for ever, as while a rank lives."""
        await asyncio.Event().wait()

    async def prepare(self) -> None:
        """See `TrainWorker`."""

    async def open_store(self) -> None:
        """See `TrainWorker`."""

    async def initialize(self, store: None, state: None) -> TrainReady:
        """See `TrainWorker`; every rank is a data-parallel rank of its own."""
        self._started += 1
        return TrainReady(0, None, self._started - 1, True)

    async def connect_engines(self, endpoints: list[EngineEndpoint]) -> None:
        """See `TrainWorker`."""

    async def train(self, rollout_id: int, batches: Sequence[Any]) -> list[dict[str, float]]:
        """Fetches the first of the batches."""
        await batches[0]
        return [{"loss": 0.0}]

    async def update_weights(self, version: str, check_equal: bool) -> dict[str, float]:
        """See `TrainWorker`."""
        return REPORT

    async def memory(self) -> dict[str, float]:
        """See `TrainWorker`."""
        return {"rank_rss_gib": 1.0, "rank_actor_rss_gib": 0.1}


class ControlGroup(TrainGroup):
    """The real group, whose workers are control-only ranks in `processes` actors."""

    def __init__(self, ranks: int, processes: Sequence[Any], supervisor: Supervisor) -> None:
        self._ranks, self._processes = ranks, processes
        args = Arguments()
        args.num_rollout = 0  # so that it logs no passes
        super().__init__(args, None, supervisor, None, POLICY)  # type: ignore[arg-type]

    def _start_workers(self, args: Arguments) -> None:
        self._check_equal = False
        self.workers = [self._processes[rank % len(self._processes)] for rank in range(self._ranks)]
        self._watches = [worker.watch.remote() for worker in self.workers]
        for rank, watch in enumerate(self._watches):
            self._supervisor.watch(watch, lambda error, rank=rank: f"rank {rank} died: {error}")
        for worker in self.workers:
            worker.prepare.remote()

    def _started(self, starts: list[TrainReady]) -> tuple[int, dict[str, Any] | None]:
        numbered = [dataclasses.replace(start, data_parallel_rank=rank) for rank, start in enumerate(starts)]
        return super()._started(numbered)


@dataclasses.dataclass(frozen=True)
class Measured:
    """One number of ranks."""

    ranks: int
    start_s: float
    train_s: float
    update_s: float
    memory_s: float
    calls: int
    driver_us: float
    driver_mib: float


def timed(call: Any) -> float:
    """Seconds of `call()`."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(ranks: int, options: argparse.Namespace) -> Measured:
    """One group of so many ranks."""
    actors = [ControlRank.remote() for _ in range(min(ranks, options.processes))]  # type: ignore[attr-defined]
    ray.get([actor.prepare.remote() for actor in actors])
    before = resident_gib(with_children=False)
    endpoints = [EngineEndpoint(f"http://10.0.{n // 250}.{n % 250}:30000", [ranks + n]) for n in range(options.engines)]
    supervisor = Supervisor(WatchdogConfig(report_after_s=0.0, limit_s=None))
    started = time.perf_counter()
    group = ControlGroup(ranks, actors, supervisor)
    group.initialize()
    group.connect_engines(endpoints)
    start_s = time.perf_counter() - started
    seconds: dict[str, list[float]] = {"train": [], "update": [], "memory": []}
    cpu = []
    for step in range(options.steps):
        batches = [ray.put(bytes(BATCH_BYTES)) for _ in range(ranks)]  # the rollout manager's, in a run
        began = time.process_time()
        seconds["train"].append(timed(lambda step=step, batches=batches: group.train(step, [batches])))
        seconds["update"].append(timed(lambda step=step: group.update_weights(step)))
        seconds["memory"].append(timed(lambda: poll_actors(group.memory())))
        cpu.append(time.process_time() - began)
        del batches
    more = resident_gib(with_children=False) - before
    group.forget()
    for actor in actors:
        ray.kill(actor)
    medians = (statistics.median(found) for found in seconds.values())
    return Measured(ranks, start_s, *medians, 3 * ranks, 1e6 * statistics.median(cpu) / ranks, 1024 * more)


def main() -> None:
    """Reads the flags and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--processes", type=int, default=4)
    options = parser.parse_args()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        columns = [field.name for field in dataclasses.fields(Measured)]
        print("".join(f"{name.replace('_', ' '):>12}" for name in columns))
        for ranks in options.ranks:
            found = measure(ranks, options)
            print("".join(f"{value:>12.{3 * isinstance(value, float)}f}" for value in vars(found).values()), flush=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
