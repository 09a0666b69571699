"""Cost of recording the timeline per training step and per sample, in time and on disk, and the speed of merging.

    python benchmarks/timeline.py [--rounds 20]

Records the events of one process in one step into a file in a temporary folder, alternately with recording off, and
prints the difference of the medians:
- a train rank: a call, its passes over 16 micro-batches each, an optimizer step, a weight update with its parts,
- the driver: a step with six phases and the memory of 64 processes,
- the rollout manager: a rollout of 2048 samples, each with its request and its reward, per sample.
Limits: 0.5 ms per step of any process; 20 us per sample, 1 % of the 2 ms that a thread has at 500 samples per second.
Then it merges one trace of 100 such steps of a driver, a rollout manager and 8 ranks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slimrl.data.sample import Sample
from slimrl.observability.timeline import merge
from slimrl.observability.tracer import FOLDER, Timeline
from slimrl.rollout.generation.sample_tracker import REQUESTS, SampleTrace

LIMIT_STEP_MS, LIMIT_SAMPLE_US = 0.5, 20.0
MICRO_BATCHES, SAMPLES, PROCESSES = 16, 2048, 64


def rank_step(timeline: Timeline) -> None:
    """One rollout's training and weight update."""
    with timeline.span("train", about=1):
        for part in ("ref_log_probs", "log_probs", "forward and backward"):
            with timeline.span(part):
                for _ in range(MICRO_BATCHES):
                    timeline.mark("micro-batch")
        with timeline.span("optimizer step"):
            pass
    with timeline.span("update_weights", about="2"):
        for part in ("stop servers", "send buckets", "commit", "servers continue"):
            timeline.mark(part)


def driver_step(timeline: Timeline) -> None:
    """One turn of the loop."""
    with timeline.span("step 1", step=1):
        for phase in ("wait_for_rollout", "train", "save", "park_training", "update_weights", "resume_engines"):
            with timeline.span(phase):
                pass
        for process in range(PROCESSES):
            timeline.count(f"rank{process}_rss_gib", 1.5)


def rollout(timeline: Timeline) -> None:
    """Every sample's request and reward."""
    trace = SampleTrace(timeline, SAMPLES)
    facts = {"sample": 1, "group": 1, "rollout": 1, "prompt_tokens": 100, "tokens": 500, "finish": "stop"}
    sample = Sample(prompt="", index=1)
    with timeline.span("generate", rollout=1):
        for _ in range(SAMPLES):
            now = time.monotonic_ns()
            trace.show(REQUESTS, 1, now, now, {**facts, "version": "1", "waited_ms": 0.1})
            trace.stage(sample, "the reward", time.monotonic())


def seconds(work: Callable[[], None]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def added(work: Callable[[Timeline], None], timeline: Timeline, rounds: int) -> float:
    """Seconds that recording adds to `work`: medians of interleaved rounds."""
    on, off = [], []
    for _ in range(rounds + 2):
        off.append(seconds(lambda: work(Timeline.off())))
        on.append(seconds(lambda: work(timeline)))
    return statistics.median(on[2:]) - statistics.median(off[2:])


def main() -> None:
    """Measures and prints one line per process, then the merge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, work, count, unit, scale, limit in (
            ("train rank, step", rank_step, 1, "ms", 1e3, LIMIT_STEP_MS),
            ("driver, step", driver_step, 1, "ms", 1e3, LIMIT_STEP_MS),
            ("rollout manager, sample", rollout, SAMPLES, "us", 1e6, LIMIT_SAMPLE_US),
        ):
            path = root / "one" / f"{name}.jsonl"
            with Timeline(path, name) as timeline:
                cost = scale * added(work, timeline, rounds) / count
            size = path.stat().st_size / (rounds + 2) / count
            print(f"{name:24} {cost:7.3f} {unit}  {cost / limit:5.2f} of {limit:g} {unit}  {size:7.0f} bytes")
        steps = {"driver": driver_step, "rollout manager": rollout} | {f"train rank {n}": rank_step for n in range(8)}
        for name, work in steps.items():
            with Timeline(root / FOLDER / f"{name}.jsonl", name) as timeline:
                for _ in range(100):
                    work(timeline)
        taken = seconds(lambda: print(f"merged {str(merge(root)).removeprefix(folder)}", end=""))
        print(f" in {taken:.1f} s")


if __name__ == "__main__":
    main()
