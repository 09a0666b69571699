"""What the calls of a weight update cost the training ranks: real ranks, `EngineCalls` and HTTP, instant engines.

    OMP_NUM_THREADS=1 python benchmarks/engine_calls.py [--engines 8 64 512 4096] [--ranks 1 2] [--updates 3]
    OMP_NUM_THREADS=1 python benchmarks/engine_calls.py --changes

Each rank is a process of a gloo group. An update stops all engines, makes them load a folder, names the version and
lets them continue, as that of `--update-weight-transport disk`; the engines of instant_engines.py answer at once. So
what is left is control. Prints, per number of engines and of ranks, medians over the updates:

- stop, load, commit: seconds of each part
- load by 0: seconds of the loads if rank 0 alone calls, as before these were divided over the ranks
- announce, by 0: seconds to tell all engines of 8 buckets of a broadcast, by all ranks and by rank 0 alone; with
  --changes of buckets of changed elements (`--update-weight-mode delta`)
- rank us, engine us: CPU of the busiest rank and of an engine per HTTP call, in microseconds

Ranks and engines share this machine's cores, so that seconds include the engines' own work.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
CALLS = 6  # of an update to one engine: pause, flush, load, flush, version, its check; and continue, which is the 7th
TIMEOUT_S = 120.0
BUCKETS = 8
TENSORS = 16  # of a bucket of 512 MiB, about
BUCKET = {
    "names": [f"model.layers.{number}.mlp.gate_proj.weight" for number in range(TENSORS)],
    "dtypes": ["bfloat16"] * TENSORS,
    "shapes": [[12288, 4096]] * TENSORS,
    "group_name": "benchmark",
    "load_format": "flattened_bucket",
    "weight_version": None,
    "flush_cache": False,
}


def rank_main(
    rank: int, ranks: int, store: str, addresses: list[str], updates: int, results: Any, changes: bool
) -> None:
    """One training rank; rank 0 sends the medians to `results`."""
    import torch.distributed as dist

    from slimrl.observability.tracer import Timeline
    from slimrl.platform.collective_errors import RankSync
    from slimrl.weights.update.announcements import CHANGES, announce, divided_announcements
    from slimrl.weights.update.engine_fanout import EngineCalls, WeightSyncError, call_all, connect, load_from_disk
    from slimrl.weights.update.topology import EngineEndpoint
    from slimrl.weights.update.transport_tensor import serialize_call

    sizes = {"described": 4000, "gaps": 16_000_000, "values": 16_000_000, "answers": len(addresses)}
    bucket = {CHANGES: [serialize_call({"group": "benchmark", "parts": sizes})]} if changes else BUCKET
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    servers, _ = connect([EngineEndpoint(f"http://{one}", [0]) for one in addresses], TIMEOUT_S, None)
    sync = RankSync(rank, WeightSyncError)
    calls = EngineCalls(servers, [], rank, sync, Timeline.off())
    announcements = divided_announcements(servers, rank, ranks, TIMEOUT_S)
    names = ("stop", "load", "commit", "by_zero", "cpu", "announce", "announce_by_zero", "announce_cpu")
    parts: dict[str, list[float]] = {name: [] for name in names}

    def timed(name: str, call: Callable[[], Any]) -> None:
        started = time.perf_counter()
        call()
        parts[name].append(time.perf_counter() - started)

    def tell(told: list[Any]) -> None:
        for _ in range(BUCKETS):
            if announcements is not None and len(told) < len(servers):
                announcements.publish(bucket)
            call_all(told, lambda server: announce(server, bucket), "announcing")

    def announce_all() -> None:
        if announcements is None:
            tell(servers if rank == 0 else [])
            return
        with announcements.round():
            if rank == 0:
                tell(announcements.own)

    for update in range(updates):
        began = time.process_time()
        timed("stop", lambda: calls.begin("abort"))
        timed("load", lambda: calls.load_from_disk("/weights"))
        timed("commit", lambda update=update: calls.commit_and_resume(str(update), "abort"))
        parts["cpu"].append(time.process_time() - began)
        timed("by_zero", lambda: sync.run_on_rank_zero(lambda: load_from_disk(servers, "/weights")))
        began = time.process_time()
        timed("announce", lambda: sync.run_on_all_ranks(announce_all))
        parts["announce_cpu"].append(time.process_time() - began)
        timed("announce_by_zero", lambda: sync.run_on_rank_zero(lambda: tell(servers)))
    medians = {name: statistics.median(found) for name, found in parts.items()}
    busiest = {name: max(sync.gather(medians[name])) for name in ("cpu", "announce_cpu")}
    if rank == 0:
        results.put(medians | busiest)
    dist.destroy_process_group()


def measure(addresses: list[str], ranks: int, updates: int, engines: psutil.Process, changes: bool) -> dict[str, float]:
    """Medians of the updates of these engines by so many ranks; `engine_cpu` is that of all engines in one update."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    before = sum(engines.cpu_times()[:2])
    with tempfile.TemporaryDirectory() as folder:
        started = [
            context.Process(target=rank_main, args=(n, ranks, f"{folder}/store", addresses, updates, results, changes))
            for n in range(ranks)
        ]
        for process in started:
            process.start()
        found: dict[str, float] = results.get(timeout=500)
        for process in started:
            process.join()
    share = (CALLS + 1) / (CALLS + 2 + 2 * BUCKETS)  # the loads of rank 0 alone, and the buckets, are more calls
    return found | {"engine_cpu": (sum(engines.cpu_times()[:2]) - before) / updates * share}


def main() -> None:
    """Reads the flags and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--changes", action="store_true", help="buckets have changes of weights")
    options = parser.parse_args()
    print("".join(f"{name:>10}" for name in ("engines", "ranks", "stop s", "load s", "commit s", "load by 0")), end="")
    print("".join(f"{name:>10}" for name in ("announce", "by 0", "rank us", "engine us", "announce")))
    for engines in options.engines:
        program = [sys.executable, str(ROOT / "benchmarks/instant_engines.py"), "--engines", str(engines)]
        served = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert served.stdout is not None
        addresses = json.loads(served.stdout.readline())["addresses"]
        for ranks in options.ranks:
            found = measure(addresses, ranks, options.updates, psutil.Process(served.pid), options.changes)
            seconds = (found[name] for name in ("stop", "load", "commit", "by_zero", "announce", "announce_by_zero"))
            print(f"{engines:>10}{ranks:>10}" + "".join(f"{value:>10.3f}" for value in seconds), end="")
            own = min(-(-engines // ranks), engines) if engines > 32 else engines  # calls of the busiest rank
            per_call = (
                1e6 * found["cpu"] / own / (CALLS + 1),
                1e6 * found["engine_cpu"] / engines / (CALLS + 1),
                1e6 * found["announce_cpu"] / own / BUCKETS,
            )
            print("".join(f"{value:>10.0f}" for value in per_call), flush=True)
        served.communicate("")


if __name__ == "__main__":
    main()
