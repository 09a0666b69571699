"""Runs one command and cleans up all of its processes and files, whichever process dies first.

`child_process.ManagedProcess` starts it as a file (stdlib only, no slimrl import, so it costs 10 ms and 10 MB), as
the parent of the command. The subreaper

- ends the process tree when the starting process is gone, even by SIGKILL (it watches a pidfd; PR_SET_PDEATHSIG would
  also fire when only the *thread* that started it ends, which happens inside Ray actors),
- is the subreaper of every descendant, so it finds and ends orphaned processes,
- sets PR_SET_PDEATHSIG for the command, so the command dies even if the subreaper is killed,
- gives the tree its own temporary folder and removes it, together with the files in /dev/shm that the tree mapped and
  whose names begin with one of the given prefixes (SGLang leaves both behind on every exit); if it is killed itself,
  the next start removes them (see `stale_resources`),
- exits with the command's exit status.

It forwards SIGTERM to the command; SIGUSR1 ends the tree immediately.
"""

import argparse
import contextlib
import ctypes
import os
import select
import signal
import sys
import tempfile
import time

sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # run as a file, outside the package
import stale_resources  # type: ignore[import-not-found]

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHARED_MEMORY = "/dev/shm/"
SCAN_INTERVALS_S = (1.0, 15.0)  # while the command starts, and later
SCAN_DELAY_S = 0.01  # after a file was created, until its process has mapped it
IN_CREATE, IN_MOVED_TO = 0x100, 0x80  # of inotify
START_UP_S = 60.0
REAP_TIMEOUT_S = 10.0


class Subreaper:
    """Starts a command, reaps its descendants, and ends all of them with the parent."""

    def __init__(self, parent: int, prefixes: list[str], command: list[str]) -> None:
        self.parent = parent
        self.prefixes = tuple(SHARED_MEMORY + prefix for prefix in prefixes)
        self.command = command
        self.mapped: set[str] = set()
        self.owner: stale_resources.Owner | None = None
        self.status: int | None = None
        self.child = 0

    def run(self) -> int:
        """Runs the command to its end; returns its wait status."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        parent_fd = open_pidfd(self.parent)
        if os.getppid() != self.parent:  # the parent died before the pidfd was open
            return 0
        wake_fd = catch_signals()
        folder = tempfile.mkdtemp(prefix=stale_resources.PREFIX)
        self.owner = stale_resources.own(folder)
        try:
            self.child = start(self.command, {**os.environ, "TMPDIR": folder})
            self.watch(parent_fd, wake_fd)
        finally:
            self.end_descendants()
            for path in self.mapped:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            stale_resources.remove(folder)
        return self.status or 0

    def watch(self, parent_fd: int | None, wake_fd: int) -> None:
        """Returns when the command has ended, when the parent is gone, or on SIGUSR1."""
        poller = select.poll()
        poller.register(wake_fd, select.POLLIN)
        if parent_fd is not None:
            poller.register(parent_fd, select.POLLIN)
        created_fd = watch_folder(SHARED_MEMORY) if self.prefixes else None
        if created_fd is not None:
            poller.register(created_fd, select.POLLIN)
        started = time.monotonic()
        next_scan = started
        while self.status is None:
            wait = min(next_scan - time.monotonic(), 60.0 if parent_fd is not None else 0.5)
            ready = {fd for fd, _ in poller.poll(max(wait, 0.0) * 1000)}
            if parent_fd in ready or os.getppid() != self.parent:
                log(f"process {self.parent}, which started this one, is gone: ending")
                return
            if wake_fd in ready and not self.handle_signals(os.read(wake_fd, 64)):
                return
            now = time.monotonic()
            if created_fd in ready:
                os.read(created_fd, 65536)
                next_scan = min(next_scan, now + SCAN_DELAY_S)
            if now >= next_scan:
                self.scan_shared_memory()
                next_scan = now + SCAN_INTERVALS_S[now - started > START_UP_S]

    def handle_signals(self, signals: bytes) -> bool:
        """Reaps descendants and forwards SIGTERM; False if the tree must end immediately (SIGUSR1)."""
        if signal.SIGTERM in signals and self.status is None:
            self.scan_shared_memory()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child, signal.SIGTERM)
        self.reap()
        return signal.SIGUSR1 not in signals

    def reap(self) -> bool:
        """Reaps every descendant that has ended; False if no descendant is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.child:
                self.status = status

    def end_descendants(self) -> None:
        self.scan_shared_memory()
        deadline, pause = time.monotonic() + REAP_TIMEOUT_S, 0.005
        while self.reap():
            for pid in descendants():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                log(f"processes {descendants()} did not end after SIGKILL: left behind")
                return
            time.sleep(pause)  # a look at all processes takes milliseconds, which those that end need
            pause = min(2 * pause, 0.04)

    def scan_shared_memory(self) -> None:
        """Records the tree's files in /dev/shm that are mapped now.

        By inode: `sem_open` maps a file under another name than that which it gets.
        """
        if not self.prefixes:
            return
        inodes: set[int] = set()
        for pid in descendants():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
                inodes |= {int(line.split(maxsplit=5)[4]) for line in maps if SHARED_MEMORY in line}
        with contextlib.suppress(OSError), os.scandir(SHARED_MEMORY) as files:
            for file in files:
                wanted = file.path.startswith(self.prefixes) and file.path not in self.mapped
                if wanted and file.inode() in inodes:
                    self.mapped.add(file.path)
                    if self.owner is not None:
                        self.owner.add_shared_memory(file.path)


def prctl(option: int, value: int) -> None:
    """The system call of this name; raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def open_pidfd(pid: int) -> int | None:
    """A file descriptor that becomes readable when `pid` ends; None before Linux 5.3."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        sys.exit(0)
    except OSError:
        return None


def watch_folder(folder: str) -> int | None:
    """A file descriptor that becomes readable when a file appears in `folder`; None without inotify."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0 or libc.inotify_add_watch(descriptor, folder.encode(), IN_CREATE | IN_MOVED_TO) < 0:
        return None
    return descriptor


def catch_signals() -> int:
    """Routes SIGCHLD, SIGTERM and SIGUSR1 into a pipe, one byte each; returns its reading end."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    # The kernel sends SIGHUP to a process group that loses its parent while a member is stopped. The pidfd reports the
    # same, and then this process must clean up. The command inherits the setting, so that it lives until its shared
    # memory has been scanned.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return read_fd


def start(command: list[str], environment: dict[str, str]) -> int:
    """Forks and executes `command`; it dies by SIGKILL together with this process."""
    subreaper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == subreaper:  # else the subreaper died before the death signal was set
            os.execvpe(command[0], command, environment)
    except OSError as error:
        log(f"cannot run {command[0]}: {error}")
    os._exit(127)


def descendants() -> list[int]:
    """Every living descendant of this process."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as stat:
                state, parent = stat.read().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry))
    found, queue = [], [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def log(message: str) -> None:
    """A line on standard error."""
    print(f"[slimrl subreaper {os.getpid()}] {message}", file=sys.stderr, flush=True)


def main() -> None:
    """Runs the command of the arguments and ends with its exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--shared-memory-prefix", action="append", default=[])
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    status = Subreaper(args.parent, args.shared_memory_prefix, args.command).run()
    if os.WIFSIGNALED(status):  # end by the same signal, so that the parent sees the cause
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
