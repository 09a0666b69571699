"""Reads a merged timeline as strictly as Chrome's trace event format asks.

Checked: only the event kinds X, M, C and i; whole non-negative microseconds; a name for every process and row; and any
two spans of one row are disjoint or nested, because viewers drop overlapping ones.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class TraceSpan:
    """A complete event under the names of its process and row; seconds."""

    process: str
    row: str
    name: str
    start: float
    seconds: float
    facts: dict[str, Any]

    @property
    def end(self) -> float:
        return round(self.start + self.seconds, 6)


@dataclasses.dataclass(frozen=True)
class Trace:
    spans: list[TraceSpan]
    counters: dict[tuple[str, str], list[tuple[float, float]]]  # (seconds, value) by process and name
    remarks: list[str]
    processes: list[str]  # in display order

    def of(self, process: str, name: str | None = None, row: str | None = None) -> list[TraceSpan]:
        return [
            span
            for span in self.spans
            if span.process == process and name in (None, span.name) and (row is None or span.row.startswith(row))
        ]


def read_trace(path: Path) -> Trace:
    """Reads the trace in `path`; raises AssertionError on invalid format."""
    document = json.loads(gzip.decompress(path.read_bytes()))
    assert set(document) == {"displayTimeUnit", "traceEvents"}
    events = document["traceEvents"]
    assert {event["ph"] for event in events} <= set("XMCi")
    for event in events:
        assert isinstance(event["name"], str) and event["name"]
        assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("pid", "tid", "ts"))
    processes, rows, order = _names(events)
    counters: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    spans, by_row = [], defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert isinstance(event["dur"], int) and event["dur"] >= 0
            by_row[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            where = processes[event["pid"]], rows[event["pid"], event["tid"]]
            spans.append(TraceSpan(*where, event["name"], event["ts"] / 1e6, event["dur"] / 1e6, event["args"]))
        elif event["ph"] == "C":
            (value,) = event["args"].values()
            assert isinstance(value, int | float)
            counters[processes[event["pid"]], event["name"]].append((event["ts"] / 1e6, value))
        elif event["ph"] == "i":
            assert event["s"] == "p"
    for intervals in by_row.values():
        _assert_nested(intervals)
    remarks = [event["name"] for event in events if event["ph"] == "i"]
    return Trace(spans, dict(counters), remarks, sorted(processes.values(), key=order.__getitem__))


def _names(events: list[dict[str, Any]]) -> tuple[dict[int, str], dict[tuple[int, int], str], dict[str, int]]:
    metadata = [event for event in events if event["ph"] == "M"]
    kinds = Counter(event["name"] for event in metadata)
    assert kinds["process_name"] == kinds["process_sort_index"] and kinds["thread_name"] == kinds["thread_sort_index"]
    processes = {event["pid"]: event["args"]["name"] for event in metadata if event["name"] == "process_name"}
    rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in metadata if event["name"] == "thread_name"}
    order = {
        processes[event["pid"]]: event["args"]["sort_index"]
        for event in metadata
        if event["name"] == "process_sort_index"
    }
    assert len(set(processes.values())) == len(processes)
    return processes, rows, order


def _assert_nested(intervals: list[tuple[int, int]]) -> None:
    open_ends: list[int] = []
    for start, end in intervals:  # in file order, which viewers follow
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], f"{start} to {end} reaches out of a span that ends at {open_ends}"
        open_ends.append(end)
