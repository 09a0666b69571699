"""Information about this machine and its processes: memory, GPUs, state, Python stack of the main thread.

A stack dump is requested by a signal, which would kill a process without a handler. So the signal is only sent to
processes that have called `enable_stack_dump`; processes that may hang call it first.

Memory of a process is the resident set (RSS) of it and its descendants, read from /proc in well under a millisecond
each; shared pages count in every process. The proportional set (PSS) would walk every page table, which takes seconds
for a process of a hundred gigabytes. Memory of the machine and its GPUs comes from /proc and nvidia-smi. Does not
import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

SIGNAL = signal.SIGUSR2
_PATIENCE_S = 1.0
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')


def enable_stack_dump() -> None:
    """Makes the signal write the stacks of all threads to stderr, even if this process hangs."""
    faulthandler.register(SIGNAL, file=sys.stderr, all_threads=True)


def worker_pid(subreaper: int) -> int | None:
    """The pid of a subreaper's child; None if it is gone."""
    try:
        children = psutil.Process(subreaper).children()
    except psutil.NoSuchProcess:
        return None
    return children[0].pid if children else None


def state(pid: int) -> str:
    """The kernel's state of a process, such as "sleeping" or "stopped"; "gone" if it has ended."""
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"


def stopped_below(pid: int) -> list[str]:
    """The stopped descendants of a process (SIGSTOP, a debugger), as "name (pid)"."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    stopped = []
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                stopped.append(f"{process.name()} ({process.pid})")
    return stopped


def frames_of(pid: int, log: Path) -> list[str]:
    """The stack of the main thread as "file:line function" lines, innermost first.

    `log` is the file of the process's stderr, which receives the stacks of all threads. Empty if the process has no
    handler, does not respond within a second (a stopped process), or ends.
    """
    if not _has_handler(pid):
        return []
    start = log.stat().st_size if log.exists() else 0
    try:
        psutil.Process(pid).send_signal(SIGNAL)
    except psutil.NoSuchProcess:  # it ended meanwhile
        return []
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        time.sleep(0.05)
        with open(log, errors="replace") as file:
            file.seek(start)
            if frames := _main_thread(file.read()):
                return frames
    return []


def _has_handler(pid: int) -> bool:
    """Whether the process handles the signal, which would kill it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = int(status.split("SigCgt:", 1)[1].split(None, 1)[0], 16)
    return bool(caught >> (SIGNAL - 1) & 1)


def _main_thread(text: str) -> list[str]:
    """The frames of the last thread in faulthandler's dump, which lists the newest thread first."""
    frames: list[str] = []
    for line in text.splitlines():
        if "(most recent call first)" in line:
            frames = []
        elif match := _FRAME.match(line):
            frames.append(f"{match[1]}:{match[2]} {match[3]}")
    return frames


PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
GIB = 1 << 30


def resident_gib(pid: int | None = None, *, with_children: bool = True) -> float:
    """Resident GiB of process `pid` (default: this one) and its descendants; 0 if it is gone."""
    queue, pages = [os.getpid() if pid is None else pid], 0
    while queue:
        process = Path("/proc") / str(queue.pop())
        with contextlib.suppress(OSError):  # it ended meanwhile
            pages += int((process / "statm").read_text().split()[1])
            if with_children:
                queue += _children(process)
    return pages * PAGE_BYTES / GIB


def _children(process: Path) -> list[int]:
    """The pids of direct children, which the kernel lists per thread."""
    found: list[int] = []
    for thread in (process / "task").iterdir():
        with contextlib.suppress(OSError):  # the thread ended meanwhile; its children are another thread's then
            found += map(int, (thread / "children").read_text().split())
    return found


def gib(size: int) -> str:
    """Formats bytes: "7.49 GiB", or "12.0 MiB" below 1 GiB."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / 2**20:,.1f} MiB"


_QUERY = ("--query-gpu=memory.total", "--format=csv,noheader,nounits")
_TIMEOUT_S = 20
_MEMINFO = Path("/proc/meminfo")
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclasses.dataclass(frozen=True)
class Machine:
    """Bytes of each GPU, and of the memory available to processes (None if unknown)."""

    gpus: tuple[int, ...]
    host: int | None


def this_machine() -> Machine:
    """Measures this machine; a GPU driver that does not respond counts as no GPU."""
    return Machine(_gpus(), _host())


def _gpus() -> tuple[int, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        done = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    words = done.stdout.split()
    if done.returncode != 0 or not all(word.isdigit() for word in words):
        return ()
    return tuple(int(word) * 2**20 for word in words)


def _host() -> int | None:
    """Physical memory, or the container's limit if that is lower."""
    if not _MEMINFO.is_file():
        return None
    total = next((line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemTotal:")), None)
    if total is None:
        return None
    physical = int(total.split()[1]) * 1024
    limit = _CONTAINER_LIMIT.read_text().strip() if _CONTAINER_LIMIT.is_file() else "max"
    return min(physical, int(limit)) if limit.isdigit() else physical


def free_memory() -> int:
    """Bytes of host memory that processes may still take: of the machine, and of the container if it has less."""
    free = int(psutil.virtual_memory().available)
    limit = _CONTAINER_LIMIT.read_text().strip() if _CONTAINER_LIMIT.is_file() else "max"
    if not limit.isdigit():
        return free
    folder = _CONTAINER_LIMIT.parent
    cached = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)  # given up at need
    used = int((folder / "memory.current").read_text()) - (0 if cached is None else int(cached[1]))
    return max(0, min(free, int(limit) - used))
