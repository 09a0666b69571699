"""Facts about another process of this machine: its state, the Python stack of its main thread, its memory.

A process that has not called `listen` is never sent the signal, which would end it. Processes that may hang call it
first of all.

Memory is the resident set (RSS) of a process and its descendants, read from /proc in well under a millisecond each;
shared pages are counted in every process. The proportional set (PSS) would walk every page table, which takes seconds
in a process of a hundred gigabytes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil

SIGNAL = signal.SIGUSR2
_PATIENCE_S = 1.0
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')


def listen() -> None:
    """From now on the signal writes the stacks of all threads to stderr, whatever this process is doing."""
    faulthandler.register(SIGNAL, file=sys.stderr, all_threads=True)


def guarded(guardian: int) -> int | None:
    """The process below a guardian, which is the one that works; None where it is gone."""
    try:
        children = psutil.Process(guardian).children()
    except psutil.NoSuchProcess:
        return None
    return children[0].pid if children else None


def state(pid: int) -> str:
    """What the kernel says of a process in one word, such as "sleeping", "stopped" or "gone"."""
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"


def stopped_below(pid: int) -> list[str]:
    """Descendants of a process that the kernel has stopped, as "name (pid)"."""
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
    """The stack of the main thread, innermost first, "file:line function" each.

    `log` is where the process writes its stderr; the stacks of all threads are there afterwards. Empty where the
    process does not listen, does not answer within a second, as one that is stopped, or ends.
    """
    if not _listens(pid):
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


def _listens(pid: int) -> bool:
    """Whether the process has a handler for the signal: without one it would end."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = int(status.split("SigCgt:", 1)[1].split(None, 1)[0], 16)
    return bool(caught >> (SIGNAL - 1) & 1)


def _main_thread(text: str) -> list[str]:
    """Frames of the last thread in a dump of faulthandler, which begins with the newest thread."""
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
    """GiB of process `pid` (this one) and its descendants; 0 where it is gone."""
    waiting, pages = [os.getpid() if pid is None else pid], 0
    while waiting:
        process = Path("/proc") / str(waiting.pop())
        with contextlib.suppress(OSError):  # it ended meanwhile
            pages += int((process / "statm").read_text().split()[1])
            if with_children:
                waiting += _children(process)
    return pages * PAGE_BYTES / GIB


def _children(process: Path) -> list[int]:
    """Direct children; a list that the kernel keeps per thread."""
    found: list[int] = []
    for thread in (process / "task").iterdir():
        with contextlib.suppress(OSError):  # the thread ended meanwhile; another has its children then
            found += map(int, (thread / "children").read_text().split())
    return found


def gib(size: int) -> str:
    """Bytes as text: "7.49 GiB", below a GiB "12.0 MiB"."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / 2**20:,.1f} MiB"
