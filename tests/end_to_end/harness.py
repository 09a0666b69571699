"""Runs the entry points as a user does, and looks for what they leave behind."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
MARK = "SLIMRL_TEST_RUN"  # inherited by everything that a run starts, so that leftovers can be found


@dataclasses.dataclass
class Started:
    """A started entry point; `finish` waits for it."""

    process: subprocess.Popen
    mark: str
    run_dir: Path
    log: Path
    started: float

    def finish(self, timeout: float) -> Finished:
        code = self.process.wait(timeout)
        return Finished(code, self.log.read_text(), self.run_dir, time.monotonic() - self.started, self.mark)

    def processes(self) -> list[psutil.Process]:
        return marked_processes(self.mark)

    def wait_for_line(self, text: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.log.read_text():
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.log.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"no {text!r} within {timeout} s:\n{self.log.read_text()[-4000:]}"
            time.sleep(0.1)

    def kill_everything(self) -> None:
        for process in self.processes():
            process.send_signal(signal.SIGKILL)
        self.process.wait(10)


@dataclasses.dataclass
class Finished:
    """How a run ended."""

    code: int
    output: str
    run_dir: Path
    seconds: float
    mark: str

    @property
    def summary(self) -> dict:
        return json.loads((self.run_dir / "summary.json").read_text())


def marked_processes(mark: str) -> list[psutil.Process]:
    """Living processes that inherited `mark` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            continue
    return found


def wait_until_gone(mark: str, timeout: float = 20.0) -> list[str]:
    """Command lines of what is still alive `timeout` seconds later; empty when all is gone."""
    deadline = time.monotonic() + timeout
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [f"{process.pid} {' '.join(process.cmdline())[:200]}" for process in left]


def start(entry: str, flags: list[str], folder: Path, run_name: str, home: Path) -> Started:
    """Starts `python <entry> <flags>` in `folder` with a bare environment."""
    mark = uuid.uuid4().hex
    log = folder / f"{run_name}-{mark[:6]}.out"
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        MARK: mark,
    }
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / entry), *flags, "--run-name", run_name],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Started(process, mark, folder / "runs" / run_name, log, time.monotonic())


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    return set(os.listdir("/dev/shm"))
