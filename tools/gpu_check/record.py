"""`Record`: the figures of one check, written to a file immediately, so that a stopped check keeps its figures so far.

Every check writes its measurements to it; the runner reads them. Uses the standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Value = float | int | str | bool


class Skip(Exception):
    """The check cannot be done on this machine; the message completes "skipped because ..."."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """One result: `value` in `unit`, optionally bounded by `at_most` or `at_least`."""

    name: str
    value: Value
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None

    def complaint(self) -> str | None:
        """Why the value is out of bounds, or None. A non-finite number is outside every bound."""
        if isinstance(self.value, str):
            return None
        if not math.isfinite(self.value):
            return f"{self.name} is {self.value}"
        unit = f" {self.unit}" if self.unit else ""
        if self.at_most is not None and self.value > self.at_most:
            return f"{self.name} is {plain(self.value)}{unit} and may be {plain(self.at_most)}{unit} at most"
        if self.at_least is not None and self.value < self.at_least:
            return f"{self.name} is {plain(self.value)}{unit} and must be {plain(self.at_least)}{unit} at least"
        return None

    def text(self) -> str:
        """Its text in the table, e.g. "loss 0.0021 (at most 0.031)"."""
        shown = f"{self.name} {plain(self.value)}{' ' + self.unit if self.unit else ''}"
        if self.at_most is not None:
            shown += f" (at most {plain(self.at_most)})"
        if self.at_least is not None:
            shown += f" (at least {plain(self.at_least)})"
        return shown

    def as_json(self) -> dict[str, Any]:
        """Without unset fields; a number that JSON cannot represent is a string."""
        value = self.value if isinstance(self.value, str) or math.isfinite(self.value) else str(self.value)
        found: dict[str, Any] = {"name": self.name, "value": value}
        found |= {"unit": self.unit} if self.unit else {}
        found |= {"at_most": self.at_most} if self.at_most is not None else {}
        return found | ({"at_least": self.at_least} if self.at_least is not None else {})


def plain(value: Value) -> str:
    """Three significant digits; whole numbers and words are unchanged."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value)):
        return f"{value:,.0f}"
    return f"{value:.3g}"


class Record:
    """Collects the figures and complaints of a check. `seconds` is the check's time limit."""

    def __init__(self, save: Callable[[dict[str, Any]], None] = lambda found: None, seconds: float = math.inf) -> None:
        self._save = save
        self.seconds = seconds
        self.figures: list[Figure] = []
        self.complaints: list[str] = []
        self.skipped: str | None = None

    def figure(
        self,
        name: str,
        value: Value,
        unit: str = "",
        *,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """Adds a figure; one outside its bound makes the check fail when it has ended."""
        added = Figure(name, value, unit, at_most, at_least)
        self.figures.append(added)
        self.complain_about(added.complaint())

    def complain_about(self, complaint: str | None) -> None:
        """Fails the check for this reason; None has no effect."""
        self.complaints += [complaint] if complaint else []
        self.save(done=False)

    def require(self, right: bool, complaint: str) -> None:
        """Fails the check for this reason unless `right`; the check continues."""
        self.complain_about(None if right else complaint)

    def save(self, *, done: bool) -> None:
        """Writes the file; `done` says that the check is complete."""
        self._save(
            {
                "done": done,
                "figures": [figure.as_json() for figure in self.figures],
                "complaints": self.complaints,
                "skipped": self.skipped,
            }
        )


def write_json(path: Path, content: Any) -> None:
    """Replaces the file atomically."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
