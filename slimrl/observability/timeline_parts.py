"""Reads what the processes of a run wrote down (`timeline_recorder`): spans, counters and remarks on one axis of time.

Promises that everything a killed run wrote is read: a line that was cut off is left out and counted, and a block that
never ended ends with the last sign of its launch. Used by `timeline`.

Processes of one machine share a clock, so that their times compare exactly. Machines are set side by side by their wall
clocks, as exactly as these agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from slimrl.observability.timeline_recorder import FORMAT, earlier_part


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
        """The last sign of life, in its own clock."""
        return max((max(_times(line)) for line in self.lines), default=self.header["monotonic_ns"])


def read_folder(folder: Path) -> Recorded:
    """Everything in `<run folder>/timeline`. Raises FileNotFoundError where nothing is recorded."""
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
