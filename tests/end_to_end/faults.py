"""Runs in which servers and the router are killed or stopped at random moments, and their sample accounting."""

from __future__ import annotations

import dataclasses
import random
import signal
import time
from pathlib import Path

import psutil

from slimrl.data.sample import Sample
from slimrl.observability.rollout_dump import load_rollout
from tests.end_to_end import harness

TARGETS = {
    "server": "slimrl.engines.sglang.cpu_patches",
    "scheduler": "sglang::scheduler",
    "router": "sglang.entry router",
    "rank": "slimrl.cluster.training.train_process",
    "driver": "train.py",
}


@dataclasses.dataclass(frozen=True)
class Hit:
    """A signal to a process some time after a step was reported."""

    step: int
    delay_s: float
    target: str
    signal: signal.Signals

    def __str__(self) -> str:
        return f"{self.signal.name} to a {self.target}, {self.delay_s:.2f} s after step {self.step}"


def plan(seed: int, kinds: list[tuple[str, signal.Signals]], steps: range, longest_delay_s: float) -> list[Hit]:
    """One hit of each kind, in random order, at random moments of these steps."""
    numbers = random.Random(seed)
    chosen = sorted(numbers.sample(steps, len(kinds)))
    shuffled = numbers.sample(kinds, len(kinds))
    return [Hit(step, numbers.uniform(0, longest_delay_s), *kind) for step, kind in zip(chosen, shuffled, strict=True)]


def strike(started: harness.Started, hits: list[Hit], seed: int, timeout: float) -> list[str]:
    """Executes the plan; returns one line per hit. On a slow machine the run may end before the last ones."""
    numbers = random.Random(seed + 1)
    lines = []
    begun = 0.0
    for hit in hits:
        started.wait_for_line(f"step {hit.step} |", timeout)
        time.sleep(hit.delay_s)
        begun = begun or time.time()
        found = victims(started, hit.target)
        while not found and started.process.poll() is None:  # the previous one is being replaced
            time.sleep(0.1)
            found = victims(started, hit.target)
        if not found:
            lines.append(f"{time.strftime('%H:%M:%S')} the run was over before {hit}")
            continue
        # a replacement that is still starting has no requests: its loss would not be counted
        serving = [process for process in found if process.create_time() < begun]
        victim = numbers.choice(serving or found)
        victim.send_signal(hit.signal)
        lines.append(f"{time.strftime('%H:%M:%S')} {hit.signal.name} to {hit.target} process {victim.pid} ({hit})")
    return lines


def victims(started: harness.Started, target: str) -> list[psutil.Process]:
    """The processes themselves, not the subreapers above them, in the order in which they were started."""
    found = started.processes(TARGETS[target])
    found = [process for process in found if process.name() != "bash"]  # scripts/resume.sh
    guarded = [process.children() if "subreaper.py" in " ".join(process.cmdline()) else [process] for process in found]
    unique = {process.pid: process for processes in guarded for process in processes}
    return [unique[pid] for pid in sorted(unique) if unique[pid].status() != psutil.STATUS_STOPPED]


def fault_lines(output: str) -> list[str]:
    """The run's own log lines about failures and replacements."""
    return [line for line in output.splitlines() if " WARNING " in line]


def rollouts(template: str | Path, steps: int) -> list[list[Sample]]:
    """The recorded samples of every step."""
    return [load_rollout(str(template), step).samples for step in range(steps)]


def assert_accounts(recorded: list[list[Sample]], prompts: list[str], group_size: int) -> None:
    """Asserts that every step trains on the next groups of the data, each complete and once."""
    per_step = len(recorded[0])
    for step, samples in enumerate(recorded):
        first = step * per_step
        assert [sample.index for sample in samples] == list(range(first, first + per_step))
        assert [sample.group_index for sample in samples] == [sample.index // group_size for sample in samples]
        for sample in samples:
            assert prompts[sample.group_index] in str(sample.prompt)
            assert sample.status.value in ("completed", "truncated")
            assert sample.reward is not None
            assert len(sample.rollout_log_probs) == sample.response_length > 0
