"""SIGKILLs that are aimed at saves and weight updates, and the proof of where they fell.

The proof is the timeline of train rank 0, in the clock of the killing process: blocks are written when they begin,
calls when they end. For a save it is also the unfinished folder among the checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import time
from pathlib import Path

from slimrl.arguments.checkpoints import UNFINISHED
from tests.end_to_end import harness

SAVE, UPDATE, ANYWHERE = "save", "update_weights", "anywhere"
KINDS = (SAVE, UPDATE, SAVE, ANYWHERE, UPDATE, SAVE, ANYWHERE, SAVE, UPDATE, ANYWHERE)
POLL_S = 0.001
LONGEST_STEP_S = 1.5
# Ray's agents report the death of their raylet, and try to for a minute if the GCS is dead too
LONGEST_END_S = 120.0


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a train rank, by time.monotonic_ns; `end_ns` is None if it never ended."""

    name: str
    about: object
    begin_ns: int
    end_ns: int | None

    def __str__(self) -> str:
        return self.name if self.about is None else f"{self.name} {self.about}"


@dataclasses.dataclass(frozen=True)
class Aim:
    """A kill within the `nth` call of this kind of a launch (from 0), after `share` of its usual length.

    With `tree` all processes of the run are killed at the same moment, else only the driver.
    """

    kind: str
    nth: int
    share: float
    tree: bool


@dataclasses.dataclass(frozen=True)
class Kill:
    """The result of a kill: the call it hit, and folders that were half-written at that moment.

    `torn` are folders that stayed half-written after all processes ended, `left` processes that did not end.
    """

    within: Call | None
    seen: list[str]
    torn: list[str]
    left: list[str]

    @property
    def in_a_save(self) -> bool:
        """Within the call, or (--async-save) behind it: a folder was half written."""
        return bool(self.seen)

    @property
    def in_an_update(self) -> bool:
        """Within the call."""
        return self.within is not None and self.within.name == UPDATE


def plan(seed: int, kills: int) -> list[Aim]:
    """Aims of all kinds, at random moments."""
    numbers = random.Random(seed)
    aims = []
    for number in range(kills):
        tree = numbers.random() < 0.5
        # the processes are looked up before the first call is over; the first weight update is within reach of the
        # others
        aims.append(Aim(KINDS[number % len(KINDS)], numbers.randrange(1 if tree else 0, 3), numbers.random(), tree))
    return aims


def calls(timeline: Path, since_ns: int = 0) -> list[Call]:
    """The calls of a train rank that began after `since_ns`, in order, without a truncated last line."""
    begun: dict[int, Call] = {}
    inner: set[int] = set()
    depth: list[int] = []
    for line in timeline.read_bytes().splitlines() if timeline.is_file() else []:
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict):
                depth.clear()  # a new process
            elif entry[0] == "b" and entry[2] == "main":
                _, number, _, name, begin_ns, facts = entry
                if depth:
                    inner.add(number)
                depth.append(number)
                begun[number] = Call(name, facts.get("about"), begin_ns, None)
            elif entry[0] == "e" and entry[1] in begun:
                begun[entry[1]] = dataclasses.replace(begun[entry[1]], end_ns=entry[2])
                if entry[1] in depth:
                    depth.remove(entry[1])
    return [call for number, call in begun.items() if number not in inner and call.begin_ns >= since_ns]


def usual_lengths(timeline: Path) -> dict[str, float]:
    """Median seconds of a save and of a weight update in an undisturbed run."""
    made = calls(timeline)
    lengths: dict[str, list[float]] = {SAVE: [], UPDATE: []}
    for call in made:
        if call.name in lengths and call.end_ns is not None:
            lengths[call.name].append((call.end_ns - call.begin_ns) / 1e9)
    return {name: statistics.median(values) for name, values in lengths.items()}


def unfinished(checkpoints: Path, since: float) -> list[str]:
    """Folders being written, or left half-written by a kill, changed after `since` (time.time)."""
    found = []
    for folder in checkpoints.glob(f"iter_*{UNFINISHED}"):
        with contextlib.suppress(FileNotFoundError):  # it was renamed just now
            if folder.stat().st_ctime >= since:
                found.append(folder.name)
    return sorted(found)


def strike(
    started: harness.Started, aim: Aim, checkpoints: Path, lengths: dict[str, float], timeout: float
) -> Kill | None:
    """Waits for the moment and kills; returns None if the run ended before."""
    timeline = started.run_dir / "timeline/train-rank-0.jsonl"
    since_ns = int(started.started * 1e9)
    deadline = time.monotonic() + timeout
    everybody = _processes(started, timeline, since_ns, deadline) if aim.tree else []
    kind = "train" if aim.kind == ANYWHERE else aim.kind
    if not wait_for_call(started, timeline, since_ns, kind, aim.nth, deadline):
        return None
    time.sleep(aim.share * lengths.get(aim.kind, LONGEST_STEP_S))
    if started.process.poll() is not None:
        return None
    launched = time.time() - (time.monotonic() - started.started)  # leftovers of earlier kills are older
    before, now_ns = unfinished(checkpoints, launched), time.monotonic_ns()
    started.process.kill()
    for pid in everybody:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    seen = [name for name in unfinished(checkpoints, launched) if name in before]
    started.process.wait(30)
    left = harness.wait_until_gone(started.mark, LONGEST_END_S)
    torn = unfinished(checkpoints, launched)
    started.kill_everything()  # also removes the files that no process is left to remove
    within = [call for call in calls(timeline, since_ns) if call.begin_ns <= now_ns < (call.end_ns or now_ns + 1)]
    return Kill(within[-1] if within else None, seen, torn, left)


def _processes(started: harness.Started, timeline: Path, since_ns: int, deadline: float) -> list[int]:
    """Every process of a run with servers and ranks, the ranks first, because they write the checkpoints."""
    wait_for_call(started, timeline, since_ns, UPDATE, 0, deadline)
    found = started.processes()
    # SGLang's schedulers overwrite the mark in their environment with their title
    family = {process.pid: process for process in found}
    for process in found:
        with contextlib.suppress(Exception):
            family |= {child.pid: child for child in process.children(recursive=True)}
    ranks = {pid for pid, process in family.items() if _is_rank(process)}
    return [*sorted(ranks), *sorted(family.keys() - ranks - {started.process.pid})]


def _is_rank(process: object) -> bool:
    with contextlib.suppress(Exception):
        return "train_process" in " ".join(process.cmdline())
    return False


def wait_for_call(
    started: harness.Started, timeline: Path, since_ns: int, kind: str, nth: int, deadline: float
) -> bool:
    """Waits until the nth call of a kind begins; False if the run ended before."""
    size = -1
    while True:
        grown = timeline.stat().st_size if timeline.is_file() else 0
        if grown != size:
            size = grown
            if sum(call.name == kind for call in calls(timeline, since_ns)) > nth:
                return True
        if started.process.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {kind} number {nth}:\n{started.log.read_text()[-4000:]}")
        time.sleep(POLL_S)
