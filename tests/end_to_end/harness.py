"""Runs the entry points as a user does, and searches for what they leave behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

import psutil

from tests.conftest import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
MARK = "SLIMRL_TEST_RUN"  # inherited by every process of a run, so that leftovers can be found
LEFT_WAIT = 20.0  # seconds after which a file in /dev/shm is a leftover
CLEAN_UP_WAIT = 5.0  # seconds that files in /dev/shm get to be mapped or removed before a run's clean-up removes them


@dataclasses.dataclass
class Started:
    """A started entry point; `finish` waits for it."""

    process: subprocess.Popen
    mark: str
    run_dir: Path
    log: Path
    temporary: Path
    started: float
    shared_memory: set[str] | None  # of this machine before the start; None: the run has a shared memory of its own
    others: OthersSharedMemory

    def finish(self, timeout: float) -> Finished:
        """Waits for its end and collects its leftovers; removes them, so that one failure causes no others.

        The limits of this class are multiplied by `PATIENCE`.
        """
        try:
            code = self.process.wait(PATIENCE * timeout)
        except subprocess.TimeoutExpired:
            self.kill_everything()  # a run that continues would slow down every test after this one
            raise
        seconds = time.monotonic() - self.started
        left = [*wait_until_gone(self.mark), *self._left_files()]
        self.others.stop()
        self._clean_up()
        return Finished(code, self.log.read_text(), self.run_dir, seconds, left)

    def processes(self, text: str = "") -> list[psutil.Process]:
        """Living processes of this run whose command line holds `text`."""
        return marked_processes(self.mark, text)

    def wait_for_line(self, text: str, timeout: float) -> None:
        deadline = time.monotonic() + PATIENCE * timeout
        while text not in self.log.read_text():
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.log.read_text()[-4000:]}"
            if time.monotonic() > deadline:
                self.kill_everything()
                raise AssertionError(f"no {text!r} within {PATIENCE * timeout} s:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.02)

    def kill_everything(self) -> None:
        """Sends SIGKILL to every process of the run and removes the files that no process is left to remove."""
        self.process.kill()  # before any search, so that the run makes no further progress
        # SGLang's schedulers overwrite their environment, including the mark, with their title
        nameless: list[psutil.Process] = []
        while processes := self.processes():
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    nameless += process.children(recursive=True)
                    process.send_signal(signal.SIGKILL)
        psutil.wait_procs(nameless, timeout=20)  # they end with their parents, a moment later
        self.process.wait(10)
        self.others.stop()
        self._clean_up()

    def _left_files(self) -> list[str]:
        # compiled kernels are kept deliberately, for the next server
        temporary = {name for name in os.listdir(self.temporary) if not name.startswith("torchinductor_")}
        return sorted(temporary | self._left_shared_memory(PATIENCE * LEFT_WAIT))

    def _left_shared_memory(self, timeout: float) -> set[str]:
        """New files of /dev/shm that stay.

        Those that a process of a concurrent test was seen to use belong to that test. Its others are soon mapped or
        removed; a concurrent run that is killed needs `CLEAN_UP_WAIT` for it. What appears after the first look is not
        of this run, whose processes have ended.
        """
        if self.shared_memory is None:
            return set()
        deadline = time.monotonic() + timeout
        left = shared_memory() - self.shared_memory - self.others.names
        while left and time.monotonic() < deadline:
            time.sleep(0.2)
            left &= shared_memory()
        return left

    def _clean_up(self) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)
        for name in self._left_shared_memory(CLEAN_UP_WAIT):
            Path("/dev/shm", name).unlink(missing_ok=True)


@dataclasses.dataclass
class Finished:
    """How a run ended. `left` are processes and files that should not exist any more."""

    code: int
    output: str
    run_dir: Path
    seconds: float
    left: list[str]

    @property
    def summary(self) -> dict:
        return json.loads((self.run_dir / "summary.json").read_text())

    def steps(self, name: str) -> list:
        """One value per step of the summary."""
        return [step[name] for step in self.summary["steps"]]


class OthersSharedMemory(threading.Thread):
    """Finds the new files of /dev/shm that processes outside a run use, as long as they use them.

    A process that is killed leaves its files, and then nothing says whose they were.
    """

    INTERVAL_S, LOOKS = 0.2, 5  # a file is created a moment before it is mapped

    def __init__(self, mark: str, before: set[str] | None) -> None:
        super().__init__(daemon=True)
        self.names: set[str] = set()
        self._mark, self._before = mark, before
        self._looks: dict[tuple[str, int], int] = {}
        self._stopped = threading.Event()

    def run(self) -> None:
        while self._before is not None and not self._stopped.wait(self.INTERVAL_S):
            files = {one for one in _inodes().items() if self._looks.get(one, 0) < self.LOOKS}
            files = {one for one in files if one[0] not in self._before}
            if files:
                self._look(files)

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def _look(self, files: set[tuple[str, int]]) -> None:
        users = {int(path.name): _in_use([path]) for path in Path("/proc").iterdir() if path.name.isdigit()}
        for name, inode in files:
            of_file = [pid for pid, used in users.items() if inode in used]
            if of_file and not any(_descends_from(self._mark, pid) for pid in of_file):
                self.names.add(name)
            self._looks[name, inode] = self.LOOKS if of_file else self._looks.get((name, inode), 0) + 1


def _descends_from(mark: str, pid: int) -> bool:
    """Whether the process or one above it has the mark; True if that cannot be read any more."""
    try:
        process = psutil.Process(pid)
        return any(one.environ().get(MARK) == mark for one in [process, *process.parents()] if one.pid != 1)
    except (psutil.Error, ProcessLookupError):
        return True


def marked_processes(mark: str, text: str = "") -> list[psutil.Process]:
    """Live processes that inherited `mark` in their environment and have `text` in their command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            alive = process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
            if alive and text in " ".join(process.cmdline()):
                found.append(process)
    return found


def wait_until_gone(mark: str, timeout: float = 20.0) -> list[str]:
    """Waits up to `timeout` seconds; returns the processes that are still alive."""
    deadline = time.monotonic() + timeout
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [str(process) for process in left]


def reset_signals() -> None:
    """For a child: restores signals that tests under nohup or in the background inherit as ignored."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def temporary_folder() -> Path:
    """A new folder for the TMPDIR of one run; `Started` removes it."""
    return Path(tempfile.mkdtemp(prefix="slimrl-", dir="/tmp"))  # short: Ray's sockets are in it


def start(
    entry: str,
    flags: list[str],
    folder: Path,
    run_name: str,
    home: Path,
    *,
    environment: dict[str, str] | None = None,
    temporary: Path | None = None,
) -> Started:
    """Starts `python <entry> <flags>` in `folder`, with `environment` added to a minimal one."""
    return launch(
        [sys.executable, str(ROOT / entry), *flags, "--run-name", run_name],
        log=folder / f"{run_name}-{uuid.uuid4().hex[:6]}.out",
        run_dir=folder / "runs" / run_name,
        cwd=folder,
        path="/usr/local/bin:/usr/bin:/bin",
        home=home,
        more=environment,
        temporary=temporary,
    )


def launch(
    command: list[str],
    *,
    log: Path,
    run_dir: Path,
    cwd: Path,
    path: str,
    home: Path,
    more: dict[str, str] | None = None,
    temporary: Path | None = None,
    own_shared_memory: bool = False,
) -> Started:
    """Starts a command with a minimal environment (and `more`), its own temporary folder and process group."""
    mark = uuid.uuid4().hex
    temporary = temporary or temporary_folder()
    environment = {"PATH": path, "HOME": str(home), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", MARK: mark}
    # those in use, too: a process that was killed before this run may still be ending
    before = None if own_shared_memory else set(_inodes())
    with open(log, "w") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**environment, **(more or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=reset_signals,
        )
    others = OthersSharedMemory(mark, before)
    others.start()
    return Started(process, mark, run_dir, log, temporary, time.monotonic(), before, others)


def places_of(text: str, *folders: Path) -> list[str]:
    """Places where others could read `text`: files below `folders`, and command lines of live processes."""
    found = []
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        with contextlib.suppress(OSError):
            found += [str(path)] if text.encode() in path.read_bytes() else []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            line = " ".join(process.cmdline())
            found += [f"{process.pid}: {line}"] if text in line else []
    return found


def shared_memory() -> set[str]:
    """Files in /dev/shm that no live process has mapped or open, which are leftovers of dead processes."""
    files = _inodes()
    used = _in_use(Path("/proc").iterdir())
    return {name for name, inode in files.items() if inode not in used}


def shared_memory_of(pids: list[int]) -> set[str]:
    """Names in /dev/shm that these processes or none use, excluding those of other processes on this machine."""
    files = _inodes()
    of_all, own = _in_use(Path("/proc").iterdir()), _in_use(Path("/proc", str(pid)) for pid in pids)
    return {name for name, inode in files.items() if inode not in of_all or inode in own}


def _inodes() -> dict[str, int]:
    """The inode of every file in /dev/shm, by name."""
    found = {}
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                found[path.name] = path.stat().st_ino
    return found


def _in_use(processes: Iterable[Path]) -> set[int]:
    """Inodes of files in /dev/shm that these processes have mapped or open.

    Not names: `sem_open` maps a file under a temporary name, which it replaces by the semaphore's afterwards.
    """
    used = set()
    for process in processes:
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            lines = (process / "maps").read_text().splitlines()
            used |= {int(line.split(maxsplit=5)[4]) for line in lines if " /dev/shm/" in line}
        with contextlib.suppress(OSError):
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(link).startswith("/dev/shm/"):
                        used.add(link.stat().st_ino)
    return used
