"""Where the milliseconds of a step go.

    python benchmarks/step_table.py runs/quickstart [--first 5] [--json FILE]

Reads `timeline.json.gz` of a finished run. The table has the phases of a step in the driver and the calls within
them, medians over the steps from `--first` on: milliseconds and their part of the step. What the driver does in a step
besides waiting for generation and for training is orchestration; its target is at most 10 % of a step.
`benchmarks/startup.py --run` prints the start of the same run.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from ratios import add_json_option, write_ratios

DRIVER, MANAGER, RANK = "driver", "rollout manager", "train rank 0"
TARGET = 0.10
# The parts of a step by process, with the blocks of the timeline that contain them.
PARTS = {
    "wait_for_rollout": (DRIVER, "wait_for_rollout", 1),
    "requests and rewards": (MANAGER, "samples", 2),
    "metrics, dump and batches": (MANAGER, "batches", 2),
    "train": (DRIVER, "train", 1),
    "log-probability passes": (RANK, "ref_log_probs|log_probs", 2),
    "forward and backward": (RANK, "forward and backward", 2),
    "optimizer step": (RANK, "optimizer step", 2),
    "save": (DRIVER, "save", 1),
    "update_weights": (DRIVER, "update_weights", 1),
    "stop servers": (RANK, "stop servers", 2),
    "send buckets": (RANK, "send buckets", 2),
    "commit": (RANK, "commit", 2),
    "servers continue": (RANK, "servers continue", 2),
}
WORK = ("requests and rewards", "train")  # generation and training; the rest of a step is orchestration


def spans_of(run: Path) -> list[dict[str, Any]]:
    """The spans of a run by their begin: process, name, start and ms. Raises FileNotFoundError without a timeline."""
    with gzip.open(run / "timeline.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans = [
        {"process": names[event["pid"]], "name": event["name"], "start": event["ts"] / 1e3, "ms": event["dur"] / 1e3}
        for event in events
        if event.get("ph") == "X" and not re.fullmatch(r"sample \d+", event["name"])
    ]
    return sorted(spans, key=lambda span: (span["start"], -span["ms"]))


def step_parts(spans: list[dict[str, Any]], first: int) -> tuple[float, dict[str, float]]:
    """The mean milliseconds of a step from number `first` on, and the mean ones of its parts.

    Steps with a checkpoint count too, so a part that few steps have adds its share. A rollout that begins while the
    step before is recorded counts in that step. Raises ValueError without steps.
    """
    steps = [s for s in spans if s["process"] == DRIVER and re.fullmatch(r"step \d+", s["name"])]
    steps = [s for s in steps if int(s["name"].split()[1]) >= first]
    if not steps:
        raise ValueError(f"the timeline has no step from {first} on; lower --first or run more rollouts")
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(steps))
    for part, (process, pattern, _) in PARTS.items():
        found = [s for s in spans if s["process"] == process and re.fullmatch(pattern, s["name"])]
        for number, step in enumerate(steps):
            inside = (s["ms"] for s in found if step["start"] <= s["start"] < step["start"] + step["ms"])
            sums[part][number] = sum(inside)
    return statistics.mean(s["ms"] for s in steps), {part: statistics.mean(values) for part, values in sums.items()}


def print_step(total: float, parts: dict[str, float]) -> float:
    """Prints the table; returns the part of orchestration in a step."""
    print(f"{'part of a step':48} {'ms':>8} {'%':>6}")
    for name, milliseconds in parts.items():
        process, _, level = PARTS[name]
        title = f"{'  ' * (level - 1)}{name}" + (f" ({process})" if level > 1 else "")
        print(f"{title:48} {milliseconds:8.1f} {100 * milliseconds / total:6.1f}")
    outer = sum(milliseconds for name, milliseconds in parts.items() if PARTS[name][2] == 1)
    print(f"{'between the phases (driver)':48} {total - outer:8.1f} {100 * (total - outer) / total:6.1f}")
    orchestration = total - sum(parts[name] for name in WORK)
    print(f"{'the step':48} {total:8.1f}  100.0")
    print(f"besides generation and training: {orchestration:.1f} ms, {orchestration / total:.1%} of a step", end="")
    print(f" (target: at most {TARGET:.0%})")
    return orchestration / total


def print_start(spans: list[dict[str, Any]]) -> float:
    """Prints the start by process, up to the first step; returns the seconds until the first rollout begins."""
    began = next(span["start"] for span in spans if span["process"] == DRIVER)  # Ray may start processes ahead
    first = next(s["start"] for s in spans if s["process"] == DRIVER and re.fullmatch(r"step \d+", s["name"]))
    inside = ("micro-batch", "start", "begin_weight_update", "commit_weight_update", "weight_version", "continue")
    print(f"{'start':56} {'from s':>7} {'to s':>7}")
    for span in spans:
        if span["start"] < first and span["ms"] >= 20 and span["name"] not in inside:
            start = (span["start"] - began) / 1e3
            print(f"{span['process'] + ': ' + span['name']:56} {start:7.2f} {start + span['ms'] / 1e3:7.2f}")
    print(f"the first rollout begins {(first - began) / 1e3:.2f} s after the start of the driver's Python")
    return (first - began) / 1e3


def main() -> None:
    """Prints the table of one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run with its timeline")
    parser.add_argument("--first", type=int, default=5, help="the first step that counts (default 5)")
    add_json_option(parser)
    options = parser.parse_args()
    part = print_step(*step_parts(spans_of(options.run), options.first))
    write_ratios(options.json, {"orchestration / step": part})


if __name__ == "__main__":
    main()
