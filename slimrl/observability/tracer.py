"""Records the spans of one process and appends them to its own file; `timeline` merges the files.

Owns `<run folder>/timeline/<process>.jsonl`. Guarantees: the start of a span is written immediately, so the file of a
killed process shows its current span; tracing never ends a run; a file has at most 2 x `PART_BYTES`, older spans are
dropped. Times are CLOCK_MONOTONIC, which all processes of a machine share. The driver, the rollout manager and every
train rank create one each. The lines of a file:

    {"slimrl_timeline": 2, "process", "token", "host", "pid", "boot", "wall_ns", "monotonic_ns"}   a process begins
    ["b", id, track, name, start_ns, facts]                          a block begins
    ["e", id, end_ns]                                                and ends
    ["s", process, track, overlaps, name, start_ns, end_ns, facts]   a span, written when it was over
    ["c", name, ns, value]                                           a counter
    ["i", name, ns]                                                  an instant event
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from slimrl.arguments.namespace import ReportArguments

FOLDER = "timeline"
MAIN = "main"
FORMAT = 2
PART_BYTES = 32 * 2**20
_FLUSH_EVERY = 512  # lines
_FLUSH_AFTER_NS = 1_000_000_000

logger = logging.getLogger(__name__)


class Timeline:
    """The recorder of one process, for all of its threads. `Timeline.off()` takes everything and does nothing.

    `facts` are what the trace shows of a span when it is clicked on: numbers, strings, booleans.
    """

    def __init__(self, path: Path | None, process: str, *, part_bytes: int = PART_BYTES) -> None:
        """Appends to `path` as `process`, its name in the trace; None records nothing."""
        self._path = path
        self._process = process
        self._token = secrets.token_hex(8)  # the next process may have the same pid, in a container even for sure
        self._part_bytes = part_bytes
        self._lines: list[list[Any]] = []
        self._ids = itertools.count(time.monotonic_ns())  # no id of an earlier process comes again
        self._marks: list[tuple[str, int] | None] = [None]  # of the open blocks of the main track, innermost last
        self._lock = threading.RLock()
        self._file: int | None = None
        self._size = 0
        self._flushed_ns = 0
        if path is not None:
            with self._forgiving():
                path.parent.mkdir(parents=True, exist_ok=True)
                self._open(path)

    @classmethod
    def off(cls) -> Timeline:
        """One that records nothing."""
        return cls(None, "")

    @classmethod
    def open(cls, flags: ReportArguments, process: str) -> Timeline:
        """The recorder for these flags; `process` is "driver", "rollout manager", "train rank 3"."""
        if not flags.timeline:
            return cls.off()
        return cls(Path(flags.run_dir).absolute() / FOLDER / f"{process.replace(' ', '-')}.jsonl", process)

    @property
    def records(self) -> bool:
        """Whether this recorder writes anything."""
        return self._file is not None

    @contextlib.contextmanager
    def span(self, name: str, track: str = MAIN, **facts: Any) -> Iterator[None]:
        """The block, on a track of its own name; blocks on one track are within one another or apart."""
        if self._file is None:
            yield
            return
        number = next(self._ids)
        with self._lock:
            self._lines.append(["b", number, track, name, time.monotonic_ns(), facts])
            self._flush()
            if track == MAIN:
                self._marks.append(None)
        try:
            yield
        finally:
            with self._lock:
                now = time.monotonic_ns()
                if track == MAIN:
                    self._end_mark(now)
                    self._marks.pop()
                self._lines.append(["e", number, now])
                if len(self._marks) == 1:  # the next block may come much later
                    self._flush()
                else:
                    self._flush_if_due(now)

    def mark(self, name: str) -> None:
        """A part of the innermost block begins; it ends with the next part or with the block."""
        if self._file is None:
            return
        with self._lock:
            now = time.monotonic_ns()
            self._end_mark(now)
            self._marks[-1] = (name, now)

    def add_process_start(self) -> None:
        """Records the time from the start of this process until now: Python's own start and the imports."""
        import psutil  # here, because the GPU checks import this module on machines without it

        now, age_s = time.monotonic_ns(), time.time() - psutil.Process().create_time()
        with self._lock:
            self._lines.append(["s", "", MAIN, False, "start of Python, imports", now - int(age_s * 1e9), now, {}])

    def add_span(self, track: str, name: str, start_ns: int, end_ns: int, process: str = "", **facts: Any) -> None:
        """Something that is over and that overlapped with others of its track (`time.monotonic_ns`).

        `process` is whose time it was, where that is another one, such as a server.
        """
        if self._file is None:
            return
        with self._lock:
            self._lines.append(["s", process, track, True, name, start_ns, end_ns, facts])
            self._flush_if_due(end_ns)

    def count(self, name: str, value: float) -> None:
        """Set a counter to a new value."""
        if self._file is not None:
            with self._lock:
                self._lines.append(["c", name, time.monotonic_ns(), value])

    def annotate(self, text: str) -> None:
        """Record a remark at this moment."""
        if self._file is not None:
            with self._lock:
                self._lines.append(["i", text, time.monotonic_ns()])

    def flush(self) -> None:
        """Everything is in the file when this returns."""
        if self._file is not None:
            with self._lock:
                self._flush()

    def close(self) -> None:
        """Ends the file; what comes later is not recorded."""
        with self._lock:
            self._flush()
            self._close_file()

    def __enter__(self) -> Timeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end_mark(self, now: int) -> None:
        if (mark := self._marks[-1]) is not None:
            self._lines.append(["s", "", MAIN, False, mark[0], mark[1], now, {}])
            self._marks[-1] = None

    def _flush_if_due(self, now: int) -> None:
        if len(self._lines) >= _FLUSH_EVERY or now - self._flushed_ns > _FLUSH_AFTER_NS:
            self._flush()

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if self._file is None or not lines:
            return
        text = b"".join(_encoded(line) + b"\n" for line in lines)
        with self._forgiving():
            self._write(self._file, text)
            if self._size > self._part_bytes and self._path is not None:
                os.replace(self._path, earlier_part(self._path))
                self._close_file()
                self._open(self._path)
        self._flushed_ns = time.monotonic_ns()

    def _close_file(self) -> None:
        file, self._file = self._file, None  # first: whatever closing does, it is done once
        if file is not None:
            os.close(file)

    def _write(self, file: int, text: bytes) -> None:
        while text:
            text = text[os.write(file, text) :]
        self._size = os.fstat(file).st_size

    def _open(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        header = {
            "slimrl_timeline": FORMAT,
            "process": self._process,
            "token": self._token,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "boot": boot_id(),
            "wall_ns": time.time_ns(),
            "monotonic_ns": time.monotonic_ns(),
        }
        self._write(
            self._file, b"\n" + orjson.dumps(header) + b"\n"
        )  # on a line of its own, also behind one that was cut off

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        """A full disk ends the recording, not the run."""
        try:
            yield
        except OSError as error:
            logger.warning("the timeline of %s ends here: %s", self._process, error)
            with contextlib.suppress(OSError):
                self._close_file()


def _encoded(line: list[Any]) -> bytes:
    """A line as JSON. Half a surrogate, as a broken text of a model's has it, becomes a question mark."""
    try:
        return orjson.dumps(line, default=str)
    except orjson.JSONEncodeError:  # numbers of more than 64 bits, too
        return json.dumps(line, default=str, ensure_ascii=False).encode(errors="replace")


def earlier_part(path: Path) -> Path:
    """Where what was written before `path` lies: `rank.jsonl` -> `rank.earlier.jsonl`."""
    return path.with_name(re.sub(r"\.jsonl$", ".earlier.jsonl", path.name))


def boot_id() -> str:
    """Equal in all processes that read the same CLOCK_MONOTONIC."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
