"""Runs the tests of tests/gpu with pytest in this process, counts results, and stops in time.

A plugin records each test, so that a suite that hangs or is stopped keeps its results so far.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import pytest

from tools.gpu_check.machine import ROOT
from tools.gpu_check.record import Record, Skip

SHOWN_FAILURES = 5
NO_TESTS = 5  # pytest's exit code if no test was selected
BROKEN = (2, 3, 4)  # a file cannot be imported, an internal error of pytest, wrong options


class Counter:
    """Counts the tests, calls `tell` after each, and stops the session at its time limit."""

    def __init__(self, seconds: float, tell: Callable[[Counter], None]) -> None:
        self._deadline = time.monotonic() + seconds
        self._tell = tell
        self._session: pytest.Session | None = None
        self.collected = 0
        self.finished = 0  # tests that ran or were skipped
        self.passed: list[str] = []
        self.failed: list[str] = []
        self.skipped: dict[str, int] = {}  # reason: how many
        self.out_of_time = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Number of tests."""
        self._session = session
        self.collected = len(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test may fail in its set-up, itself, or in its end."""
        name = report.nodeid.split("::", 1)[-1]
        if report.failed and name not in self.failed:
            self.failed.append(name)
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            reason = reason.removeprefix("Skipped: ")
            self.skipped[reason] = self.skipped.get(reason, 0) + 1
        elif report.when == "call" and report.passed:
            self.passed.append(name)

    def pytest_runtest_logfinish(self) -> None:
        """Stops the session between two tests if its time is over."""
        self.finished += 1
        self._tell(self)
        self.out_of_time = time.monotonic() > self._deadline
        if self.out_of_time and self._session is not None:
            self._session.shouldstop = "its time is over"


def suite(record: Record, paths: Sequence[str], options: Sequence[str] = ()) -> None:
    """Runs the tests of these files for at most `record.seconds`; a failed test fails the check."""
    counter = Counter(record.seconds, lambda counter: write(record, counter))
    sys.path.insert(0, str(ROOT))
    files = [str(ROOT / path) for path in paths]
    arguments = [*files, f"--rootdir={ROOT}", "-q", "--tb=short", "-p", "no:cacheprovider"]
    code = pytest.main([*arguments, *options], plugins=[counter])
    if code == NO_TESTS and not counter.collected:
        raise Skip("the file has no tests")
    write(record, counter)
    if code in BROKEN and not counter.out_of_time:
        record.complain_about(f"pytest ended with exit code {int(code)}")
    if counter.collected and sum(counter.skipped.values()) == counter.collected:
        record.figures.clear()
        raise Skip("; ".join(reasons(counter)))


def write(record: Record, counter: Counter) -> None:
    """Replaces the recorded figures by the current ones."""
    record.figures.clear()
    record.complaints.clear()
    record.figure("passed", len(counter.passed), f"of {counter.collected}")
    if counter.failed:
        record.figure("failed", len(counter.failed))
        shown = "; ".join(counter.failed[:SHOWN_FAILURES])
        record.complain_about(f"failed tests: {shown}" + (" ..." if len(counter.failed) > SHOWN_FAILURES else ""))
    for reason, count in counter.skipped.items():
        record.figure(f"skipped ({reason})", count)
    if left := counter.collected - counter.finished:
        record.figure("not run, the time was over", left)


def reasons(counter: Counter) -> list[str]:
    """Each skip reason once, with the number of tests."""
    return [f"{reason} ({count} tests)" if count > 1 else reason for reason, count in counter.skipped.items()]
