"""Runs the checks, one after another, each in a separate process with a time limit.

A CUDA error, a hang or an out-of-memory error affects only its own process. slimrl's subreaper supervises each process
and ends everything that the check started (servers, ranks, Ray). Called by `__main__`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from slimrl.processes import ManagedProcess, importable
from slimrl.processes.child_process import describe_exit
from tools.gpu_check.machine import Machine
from tools.gpu_check.record import write_json
from tools.gpu_check.table import Check, skip_reason

Status = Literal["passed", "failed", "skipped"]
LOG_LINES = 120
STOP_S = 15.0  # grace period after SIGTERM
POLL_S = 0.05
RESERVE_S = 30.0  # time for a check that watches its own limit to end the current test
SHARED_MEMORY_PREFIXES = ("sglang_", "sgl_", "torch_", "plasma")
# torch adds the rank as a prefix if torch.distributed is initialised
_EXCEPTION = re.compile(r"^(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)(?:: .*|:)?)$")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of a check. `because` is the reason of a failure or skip; `log` is the end of its output if it failed."""

    name: str
    status: Status
    because: str | None = None
    seconds: float = 0.0
    figures: Sequence[dict[str, Any]] = ()
    log: Sequence[str] = ()


def run_all(
    checks: Sequence[Check],
    machine: Machine,
    minutes: float,
    tell: Callable[[Outcome], None],
    started: Callable[[Check], None] = lambda check: None,
) -> bool:
    """Runs the checks that fit and calls `tell` with each outcome. False after Ctrl-C, with the rest skipped."""
    deadline = time.monotonic() + 60 * minutes
    interrupted = False
    for check in checks:
        left = deadline - time.monotonic()
        reason = "the check was interrupted before" if interrupted else skip_reason(check, machine, max(left, 0) / 60)
        if reason is not None:
            tell(Outcome(check.name, "skipped", reason))
            continue
        started(check)
        outcome, interrupted = run_check(check, machine, left, minutes)
        tell(outcome)
    return not interrupted


def run_check(check: Check, machine: Machine, left_s: float, minutes: float) -> tuple[Outcome, bool]:
    """The outcome of one check that may take `left_s` of all `minutes`; and whether Ctrl-C ended it."""
    limit_s = left_s if check.stops_in_time else min(check.limit_s, left_s)
    with tempfile.TemporaryDirectory(prefix="slimrl-check-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        arguments = dict(check.arguments)
        if check.judges_machine:
            write_json(Path(folder, "machine.json"), dataclasses.asdict(machine))
            arguments["machine"] = str(Path(folder, "machine.json"))
        job = {
            "function": check.function,
            "arguments": arguments,
            "seconds": max(limit_s - RESERVE_S, RESERVE_S),
            "result": str(result),
        }
        write_json(Path(folder, "job.json"), job)
        started = time.monotonic()
        code, interrupted = _wait(check, Path(folder, "job.json"), log, limit_s)
        seconds = time.monotonic() - started
        found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    own_limit = check.limit_s <= left_s and not check.stops_in_time and not interrupted
    status, because = judge(
        found,
        code,
        lines,
        f"it took longer than {check.limit_s / 60:g} minutes" if own_limit else None,
        "it was interrupted" if interrupted else f"the {minutes:g} minutes were over before it ended",
    )
    shown = lines[-LOG_LINES:] if status == "failed" else []
    return Outcome(check.name, status, because, seconds, found.get("figures", []), shown), interrupted


def _wait(check: Check, job: Path, log: Path, limit_s: float) -> tuple[int | None, bool]:
    """The exit code of the check's process, None if it was stopped here; and whether Ctrl-C was the reason."""
    process = ManagedProcess(
        [sys.executable, "-m", "tools.gpu_check.child", str(job)],
        name=f"check {check.name}",
        log_path=log,
        environment=importable(),
        shared_memory_prefixes=SHARED_MEMORY_PREFIXES,
    )
    deadline = time.monotonic() + limit_s
    interrupted = False
    process.start()
    try:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        interrupted = True
    code = process.poll()
    process.stop(0.0 if interrupted else STOP_S)
    return code, interrupted


def judge(
    found: dict[str, Any], code: int | None, lines: Sequence[str], too_long: str | None, ended: str
) -> tuple[Status, str | None]:
    """The status and reason of a check from its results and the exit of its process.

    `code` None: it was stopped, because of `too_long` if given, else because the time of all checks was over (`ended`),
    which is not a failure.
    """
    complaints = found.get("complaints", [])
    if code is None and too_long is not None:
        return "failed", too_long
    if complaints:
        return "failed", "; ".join(complaints)
    if code is None:
        return "skipped", ended
    if code != 0 or not found.get("done"):
        return "failed", last_error(lines) or f"its process ended with {describe_exit(code)}"
    if found["skipped"] is not None:
        return "skipped", found["skipped"]
    return "passed", None


def last_error(lines: Sequence[str]) -> str | None:
    """The line of the last exception in a log, or else the last line."""
    raised = [found.group(1) for line in lines if (found := _EXCEPTION.match(line))]
    printed = [line.strip() for line in lines if line.strip()]
    return (raised or printed or [None])[-1]
