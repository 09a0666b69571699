"""Memory of a process and everything below it, read from /proc in well under a millisecond per process.

Resident memory (RSS): pages that several processes share are counted in each. The kernel's fair share of them (PSS)
would walk every page table, which takes seconds in a process of a hundred gigabytes.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

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
