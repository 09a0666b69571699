"""Checks with every kind of result, for the tests of the runner of scripts/gpu_check.sh."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from tools.gpu_check.record import Record, Skip


def succeed(record: Record, value: float = 1.0) -> None:
    record.figure("speed", value, "GB/s")


def describe(record: Record, machine: str) -> None:
    record.figure("GPU", json.loads(Path(machine).read_text())["gpus"][0]["name"])


def miss_a_bound(record: Record) -> None:
    record.figure("error", 0.5, at_most=0.25)
    record.require(False, "something else is wrong")


def leave_out(record: Record) -> None:
    record.figure("error", 0.1)
    raise Skip("the GPU is too small")


def raise_error(record: Record) -> None:
    record.figure("error", 0.1)
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def kill_itself(record: Record) -> None:
    record.figure("error", 0.1)
    os.kill(os.getpid(), signal.SIGKILL)


def hang(record: Record, folder: str) -> None:
    """Starts a process that would outlive it, and records its pid."""
    record.figure("begun", True)
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(folder, "pid.tmp").write_text(str(child.pid))
    Path(folder, "pid.tmp").rename(Path(folder, "pid"))
    time.sleep(600)
