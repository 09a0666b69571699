"""Merges the recorded timeline of a run into one Chrome trace file, for example for https://ui.perfetto.dev.

    python -m slimrl.observability.timeline runs/NAME [--output FILE]

Reads what `slimrl.observability.tracer` recorded in each process, at any time: during a run, after its end, or after it
was killed. A line that was cut off is skipped and counted; a block that never ended gets the last time of its launch.
Each process has one row for its own work, rows for what overlaps (requests, rewards), and counters; spans on a row are
nested or disjoint, as the format asks. Processes of one machine share a clock and compare exactly; machines are aligned
by their wall clocks. Exits with 2 where nothing is recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gzip
import heapq
import io
import itertools
import logging
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from slimrl.arguments.namespace import ReportArguments
from slimrl.observability.tracer import FOLDER, FORMAT, MAIN, Timeline, earlier_part
from slimrl.processes.files import atomic_file

logger = logging.getLogger("slimrl")


@dataclasses.dataclass
class Span:
    """`process` did `name`; times in ns since 1970. One that `overlaps` needs a row to itself."""

    process: str
    track: str
    overlaps: bool
    name: str
    start_ns: int
    end_ns: int
    facts: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Point:
    """A counter's new value, or a remark where `value` is None."""

    process: str
    name: str
    ns: int
    value: float | None


@dataclasses.dataclass
class Recorded:
    """All that is known of a run. `unfinished` blocks never ended, `broken_lines` were cut off."""

    spans: list[Span]
    points: list[Point]
    unfinished: int
    broken_lines: int


@dataclasses.dataclass
class _Session:
    """One process from its beginning to its end (or to its end's unseen cause)."""

    header: dict[str, Any]
    lines: list[list[Any]]

    def last_ns(self) -> int:
        """The last event, in the process's own clock."""
        return max((max(_times(line)) for line in self.lines), default=self.header["monotonic_ns"])


def read_folder(folder: Path) -> Recorded:
    """Reads `<run folder>/timeline`. Raises FileNotFoundError if nothing is recorded."""
    paths = sorted(path for path in folder.glob("*.jsonl") if not path.name.endswith(".earlier.jsonl"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no recorded timeline: a run writes it unless --no-timeline is given")
    sessions: list[_Session] = []
    broken = 0
    for path in paths:
        found, cut_off = _sessions([earlier_part(path), path])
        sessions, broken = sessions + found, broken + cut_off
    offsets = _offsets(sessions)
    ends = _launch_ends(sessions, offsets)
    recorded = Recorded([], [], 0, broken)
    for session, end in zip(sessions, ends, strict=True):
        _add(recorded, session, offsets[session.header["boot"]], end)
    return recorded


def _sessions(paths: list[Path]) -> tuple[list[_Session], int]:
    sessions: list[_Session] = []
    broken = 0
    for line in _lines(paths):
        try:
            value = orjson.loads(line)
        except ValueError:
            broken += 1
            continue
        if isinstance(value, dict):
            if value.get("slimrl_timeline") != FORMAT:
                raise ValueError(f"{paths[-1]} is no recorded timeline of format {FORMAT}: {line[:80]!r}")
            if sessions and sessions[-1].header["token"] == value["token"]:
                continue  # the same process, in the next part of its file
            sessions.append(_Session(value, []))
        elif sessions:
            sessions[-1].lines.append(value)
    return sessions, broken


def _lines(paths: list[Path]) -> Iterator[bytes]:
    for path in paths:
        if path.is_file():
            with open(path, "rb") as file:
                yield from (line for line in file if line.strip())


def _times(line: list[Any]) -> list[int]:
    match line:
        case ["b", _, _, _, start, _]:
            return [start]
        case ["e", _, end]:
            return [end]
        case ["s", _, _, _, _, start, end, _]:
            return [start, end]
        case ["c", _, when, _] | ["i", _, when]:
            return [when]
    raise ValueError(f"this line is of no kind that a timeline knows: {line!r}")


def _offsets(sessions: list[_Session]) -> dict[str, int]:
    """By boot of a machine: what turns its clock into ns since 1970; from its first session, for all of them."""
    offsets: dict[str, int] = {}
    for session in sorted(sessions, key=lambda session: session.header["wall_ns"]):
        offsets.setdefault(session.header["boot"], session.header["wall_ns"] - session.header["monotonic_ns"])
    return offsets


def _launch_ends(sessions: list[_Session], offsets: dict[str, int]) -> list[int]:
    """For each session the last sign of life of the launch that it belongs to: a driver begins each launch."""
    begins = [session.header["monotonic_ns"] + offsets[session.header["boot"]] for session in sessions]
    drivers = sorted(b for b, s in zip(begins, sessions, strict=True) if s.header["process"] == "driver")
    launches = [sum(driver <= begin for driver in drivers) for begin in begins]
    ends: dict[int, int] = {}
    for launch, session in zip(launches, sessions, strict=True):
        ends[launch] = max(ends.get(launch, 0), session.last_ns() + offsets[session.header["boot"]])
    return [ends[launch] for launch in launches]


def _add(recorded: Recorded, session: _Session, offset: int, launch_end: int) -> None:
    own = session.header["process"]
    open_blocks: dict[int, Span] = {}
    for line in session.lines:
        match line:
            case ["b", number, track, name, start, facts]:
                open_blocks[number] = Span(own, track, False, name, start + offset, launch_end, facts)
                recorded.spans.append(open_blocks[number])
            case ["e", number, end]:
                if (block := open_blocks.pop(number, None)) is not None:  # None: it began in a part that was dropped
                    block.end_ns = end + offset
            case ["s", process, track, overlaps, name, start, end, facts]:
                recorded.spans.append(Span(process or own, track, overlaps, name, start + offset, end + offset, facts))
            case ["c", name, when, value]:
                recorded.points.append(Point(own, name, when + offset, value))
            case ["i", name, when]:
                recorded.points.append(Point(own, name, when + offset, None))
    for block in open_blocks.values():
        block.facts = {**block.facts, "unfinished": True}
    recorded.unfinished += len(open_blocks)


REQUESTS = "requests"
WAITED_MS = "waited_ms"
_ORDER = ("driver", "rollout manager", "train rank", "server")
_MERGE_AT_END_BYTES = 32 * 2**20  # which takes seconds


@dataclasses.dataclass(frozen=True)
class Merged:
    """The merged file, and the amounts of its contents."""

    path: Path
    processes: int
    spans: int
    unfinished: int
    broken_lines: int

    def __str__(self) -> str:
        text = f"{self.path}: {self.spans:,} spans of {self.processes} processes, {_mib(self.path.stat().st_size)}"
        if self.unfinished:
            text += f"; {self.unfinished} never ended"
        if self.broken_lines:
            text += f"; {self.broken_lines} lines were cut off and are left out"
        return text


def merge(run_dir: Path, output: Path | None = None) -> Merged:
    """Writes the trace (`<run_dir>/timeline.json.gz`) atomically. Raises FileNotFoundError if nothing is recorded."""
    recorded = read_folder(run_dir / FOLDER)
    output = output or run_dir / "timeline.json.gz"
    with (
        atomic_file(output) as unfinished,
        gzip.open(unfinished, "wb", compresslevel=3) as packed,
        io.BufferedWriter(packed, 2**20) as file,
    ):
        file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(trace_events(recorded)):
            file.write((b",\n" if number else b"") + orjson.dumps(event))
        file.write(b"\n]}\n")
    processes = {span.process for span in recorded.spans} | {point.process for point in recorded.points}
    return Merged(output, len(processes), len(recorded.spans), recorded.unfinished, recorded.broken_lines)


@contextlib.contextmanager
def open_timeline(flags: ReportArguments) -> Iterator[Timeline]:
    """The driver's timeline; on exit it is merged with those of all processes."""
    timeline = Timeline.open(flags, "driver")
    timeline.add_process_start()
    try:
        yield timeline
    finally:
        timeline.close()
        if flags.timeline:
            logger.info("%s", merge_at_end(Path(flags.run_dir)))


def merge_at_end(run_dir: Path) -> str:
    """Called by the driver at the end of a run: exports the trace, or returns the export command if it is large."""
    size = sum(path.stat().st_size for path in (run_dir / FOLDER).glob("*.jsonl"))
    if size > _MERGE_AT_END_BYTES:
        return f"the timeline is {_mib(size)}: put it together with python -m slimrl.observability.timeline {run_dir}"
    try:
        return f"timeline: {merge(run_dir)}"
    except (OSError, ValueError) as error:  # must not fail the run
        return f"the timeline could not be put together: {error}"


def trace_events(recorded: Recorded) -> Iterator[dict[str, Any]]:
    """Chrome trace events: names first, then everything in the order of time; microseconds since the first of all."""
    points = [*recorded.points, *_in_flight(recorded.spans)]
    begin = min([span.start_ns for span in recorded.spans] + [point.ns for point in points], default=0)
    rows = _Rows()
    placed = [(span, *rows.place(span)) for span in sorted(recorded.spans, key=lambda s: (s.start_ns, -s.end_ns))]
    for point in points:
        rows.process(point.process)
    yield from rows.names()
    events = [_complete(span, process, row, begin) for span, process, row in placed]
    events += [_point(point, rows.process(point.process), begin) for point in points]
    yield from sorted(events, key=lambda event: event["ts"])


class _Rows:
    """Numbers for processes and rows: a row for each track, and as many more as its overlapping spans need."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._tracks: dict[tuple[str, str], list[list[int]]] = {}  # of each row: the ends of its open spans
        self._free: dict[tuple[str, str], list[int]] = defaultdict(list)  # rows of overlapping spans: lowest first
        self._busy: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        self._numbers: dict[tuple[str, str, int], int] = {}

    def process(self, name: str) -> int:
        """The number of a process, 1 for the first."""
        return self._processes.setdefault(name, len(self._processes) + 1)

    def place(self, span: Span) -> tuple[int, int]:
        """(process, row) of a span; spans come in the order of their begin, of equal ones the longest first."""
        row = self._lowest_free(span) if span.overlaps else self._nested(span)
        number = self._numbers.setdefault((span.process, span.track, row), len(self._numbers) + 1)
        return self.process(span.process), number

    def _lowest_free(self, span: Span) -> int:
        key = (span.process, span.track)
        busy, free = self._busy[key], self._free[key]
        while busy and busy[0][0] <= span.start_ns:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (span.end_ns, row))
        return row

    def _nested(self, span: Span) -> int:
        rows = self._tracks.setdefault((span.process, span.track), [])
        for row, ends in enumerate(rows):
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
            if not ends or span.end_ns <= ends[-1]:
                ends.append(span.end_ns)
                return row
        rows.append([span.end_ns])
        return len(rows) - 1

    def names(self) -> Iterator[dict[str, Any]]:
        """The metadata: processes in the order of `_ORDER`, their own work above what overlaps."""
        for place, name in enumerate(sorted(self._processes, key=_process_order)):
            number = self._processes[name]
            yield _metadata("process_name", number, 0, name=name)
            yield _metadata("process_sort_index", number, 0, sort_index=place)
        order = sorted(self._numbers, key=lambda key: (key[0], key[1] != MAIN, key[1], key[2]))
        for place, (process, track, row) in enumerate(order):
            process_number, number = self._processes[process], self._numbers[process, track, row]
            title = track if row == 0 else f"{track} {row + 1}"
            yield _metadata("thread_name", process_number, number, name=title)
            yield _metadata("thread_sort_index", process_number, number, sort_index=place)


def _process_order(name: str) -> tuple[Any, ...]:
    kind = next((place for place, prefix in enumerate(_ORDER) if name.startswith(prefix)), len(_ORDER))
    return kind, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _metadata(kind: str, process: int, row: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "ts": 0, "args": args}


def _complete(span: Span, process: int, row: int, begin: int) -> dict[str, Any]:
    # whole microseconds: rounded down alike, an end never comes to lie behind that of the span around it
    start, end = (span.start_ns - begin) // 1000, (span.end_ns - begin) // 1000
    event = {"ph": "X", "cat": span.track, "name": span.name, "pid": process, "tid": row}
    return {**event, "ts": start, "dur": end - start, "args": span.facts}


def _point(point: Point, process: int, begin: int) -> dict[str, Any]:
    where = {"name": point.name, "pid": process, "tid": 0, "ts": (point.ns - begin) // 1000}
    if point.value is None:
        return {"ph": "i", "s": "p", **where}
    return {"ph": "C", **where, "args": {"value": point.value}}


def _in_flight(spans: Iterable[Span]) -> Iterator[Point]:
    """How many of the recorded requests were with an engine, and how many waited to be sent, at every change."""
    changes: list[tuple[int, int, int]] = []
    process = ""
    for span in spans:
        if span.track != REQUESTS:
            continue
        process = span.process  # the rollout manager, which alone makes requests
        changes += [(span.start_ns, 1, 0), (span.end_ns, -1, 0)]
        if waited := int(span.facts.get(WAITED_MS, 0) * 1e6):
            changes += [(span.start_ns - waited, 0, 1), (span.start_ns, 0, -1)]
    running = waiting = 0
    for moment, group in itertools.groupby(sorted(changes), key=lambda change: change[0]):
        before = running, waiting
        for _, sent, queued in group:
            running, waiting = running + sent, waiting + queued
        if running != before[0]:
            yield Point(process, "requests in flight", moment, running)
        if waiting != before[1]:
            yield Point(process, "requests waiting", moment, waiting)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def main(argv: list[str]) -> int:
    """Merges one run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m slimrl.observability.timeline", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("--output", type=Path, help="the trace to write (timeline.json.gz in the run's folder)")
    options = parser.parse_args(argv)
    try:
        print(merge(options.run_dir, options.output))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
