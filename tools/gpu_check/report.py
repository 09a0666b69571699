"""Reports the outcomes of the checks as a table on the terminal and as `gpu_check.json`.

The file is complete JSON at any time, and identifies neither user nor machine: home folder, user, host names and
addresses of this machine are replaced. Uses the standard library only. Called by `__main__`.
"""

from __future__ import annotations

import contextlib
import datetime
import getpass
import os
import re
import shutil
import socket
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimrl import __version__
from tools.gpu_check.machine import ROOT, Machine, tested_versions
from tools.gpu_check.record import Figure, write_json
from tools.gpu_check.runner import Outcome
from tools.gpu_check.table import Check

FORMAT = "slimrl-gpu-check-1"
LEAST_WIDTH, PIPE_WIDTH = 80, 120
LONGEST_REASON = 600  # characters in the table; the file has the full text
RESULT_WIDTH = len("skipped")
COMMON_NAMES = {
    "root",
    "user",
    "localhost",
    "admin",
    "python",
    "torch",
    "ray",
}  # say nothing, and are in ordinary words


class Table:
    """Prints rows as they finish: name, result, and figures or the reason, wrapped to the width of the terminal."""

    def __init__(self, names: Sequence[str], width: int | None = None) -> None:
        self._name_width = max(map(len, ["check", *names]))
        self._width = max(width or shutil.get_terminal_size((PIPE_WIDTH, 0)).columns, LEAST_WIDTH)

    def head(self) -> str:
        """The header."""
        titles = self._line("check", "result", "figures, or reason")
        return f"{titles}\n{'-' * min(self._width, 100)}"

    def row(self, outcome: Outcome) -> str:
        """One check; if it has both, the figures are below the reason."""
        because = outcome.because or ""
        if outcome.because and outcome.status == "skipped":
            because = f"because {because}"
        because = textwrap.shorten(because, LONGEST_REASON, placeholder=" ...")
        figures = "; ".join(figure_of(found).text() for found in outcome.figures)
        parts = [part for part in (because, figures) if part] or [""]
        first, *more = parts
        return "\n".join(
            [self._line(outcome.name, outcome.status, first), *(self._line("", "", part) for part in more)]
        )

    def _line(self, name: str, result: str, text: str) -> str:
        start = f"{name:{self._name_width}}  {result:{RESULT_WIDTH}}  "
        wrapped = textwrap.wrap(text, self._width - len(start), break_on_hyphens=False) or [""]
        return ("\n" + " " * len(start)).join([start + wrapped[0], *wrapped[1:]]).rstrip()


def figure_of(found: dict[str, Any]) -> Figure:
    """The figure that `Figure.as_json` wrote."""
    return Figure(found["name"], found["value"], found.get("unit", ""), found.get("at_most"), found.get("at_least"))


def summary_line(outcomes: Sequence[Outcome], seconds: float) -> str:
    """ "12 passed, 1 failed, 3 skipped in 14 min"."""
    counts = [f"{sum(one.status == status for one in outcomes)} {status}" for status in ("passed", "failed", "skipped")]
    return f"{', '.join(counts)} in {seconds / 60:.1f} min"


def check_list(checks: Sequence[Check], width: int | None = None) -> str:
    """The text of --list: purpose, requirements and duration of every check."""
    width = max(width or shutil.get_terminal_size((PIPE_WIDTH, 0)).columns, LEAST_WIDTH)
    names = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        needs = check.needs.text()
        text = check.what + (f"; needs {needs}" if needs else "")
        start = f"{check.name:{names}}  {check.minutes:>4g} min  "
        after = " " * len(start)
        lines.append(textwrap.fill(text, width, initial_indent=start, subsequent_indent=after, break_on_hyphens=False))
    return "\n".join(lines)


class Report:
    """`gpu_check.json`, rewritten with each outcome."""

    def __init__(self, path: Path, machine: Machine, minutes: float) -> None:
        self._path = path
        self._started = time.monotonic()
        self._redacted = Redaction()
        self.outcomes: list[Outcome] = []
        self._head = {
            "format": FORMAT,
            "slimrl": {"version": __version__, "commit": commit()},
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "minutes": minutes,
            "machine": dict(machine.facts),
            "tested_versions": tested_versions(),
        }

    @property
    def seconds(self) -> float:
        """Seconds since it was opened."""
        return time.monotonic() - self._started

    def add(self, outcome: Outcome) -> None:
        """Takes an outcome down and writes the file. Raises OSError where it cannot be written."""
        self.outcomes.append(outcome)
        self.save(finished=False)

    def save(self, *, finished: bool) -> None:
        """Writes the file; `finished` says that every check was done or skipped."""
        checks = [
            {
                "name": one.name,
                "status": one.status,
                "because": one.because,
                "seconds": round(one.seconds, 1),
                "figures": list(one.figures),
                **({"log": list(one.log)} if one.log else {}),
            }
            for one in self.outcomes
        ]
        content = self._head | {"finished": finished, "seconds": round(self.seconds, 1), "checks": checks}
        write_json(self._path, self._redacted(content))


class Redaction:
    """Replaces words that identify this user or machine, in every string of a JSON value."""

    def __init__(self, replaced: dict[str, str] | None = None) -> None:
        """`replaced` maps private words to their replacements; default: those of this machine."""
        words = of_this_machine() if replaced is None else replaced
        ordered = sorted(words, key=len, reverse=True)  # the longest first: the folder before the home that it is in
        self._words = words
        bounded = (rf"(?<![\w.-]){re.escape(word)}(?![\w-])" for word in ordered)
        self._pattern = re.compile("|".join(bounded)) if ordered else None

    def __call__(self, value: Any) -> Any:
        """`value` with every string in it replaced."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: self._words[found.group()], value) if self._pattern else value
        if isinstance(value, dict):
            return {self(key): self(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self(inner) for inner in value]
        return value


def of_this_machine() -> dict[str, str]:
    """Folders, user, host names and addresses of this machine, with their replacements."""
    found = {str(ROOT): "<slimrl>", os.path.expanduser("~"): "<home>", tempfile.gettempdir(): "<tmp>"}
    names = {socket.gethostname(): "<host>", socket.gethostname().split(".")[0]: "<host>", _user(): "<user>"}
    found |= {name: shown for name, shown in names.items() if name.lower() not in COMMON_NAMES}
    found |= dict.fromkeys(_addresses(), "<address>")
    return {word: shown for word, shown in found.items() if len(word) > 1}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return ""


def _addresses() -> set[str]:
    """Addresses of this machine that other machines can reach."""
    found = set()
    with contextlib.suppress(OSError):
        found |= {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # selects a route; nothing is sent
        found.add(probe.getsockname()[0])
    return {address for address in found if not address.startswith("127.") and address not in ("::1", "0.0.0.0")}


def commit() -> str | None:
    """The checkout's commit, with "+changes" if files differ from it; None without a git checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+changes"],
            cwd=ROOT, capture_output=True, text=True, timeout=20,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
