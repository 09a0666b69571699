"""The subreaper: whichever process dies first, nothing is left behind. Real processes, but no engine."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

import slimrl
from slimrl.processes import ManagedProcess, ProcessStartError, stale_resources, subreaper

pytestmark = pytest.mark.slow

# Starts a grandchild that ignores SIGTERM in its own session, maps a file in shared memory, and sleeps.
TREE = """
import mmap, os, signal, subprocess, sys, tempfile, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen(["sleep", "600"], start_new_session=True)
with open("/dev/shm/slimrl-test-%d" % os.getpid(), "wb+") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
open(os.path.join(tempfile.gettempdir(), "left-over"), "w").close()
print("tree", os.getpid(), grandchild.pid, tempfile.gettempdir(), flush=True)
time.sleep(600)
"""


def managed(folder: Path, program: str) -> ManagedProcess:
    return ManagedProcess(
        [sys.executable, "-c", textwrap.dedent(program)],
        name="test server",
        log_path=folder / "log",
        shared_memory_prefixes=["slimrl-test-"],
    )


def tree_of(log: Path) -> tuple[list[int], Path, Path]:
    """Child and grandchild, temporary folder and shared memory of `TREE`, once it is running."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        words = log.read_text().split() if log.exists() else []
        if "tree" in words:
            child, grandchild, folder = words[words.index("tree") + 1 :][:3]
            return [int(child), int(grandchild)], Path(folder), Path(f"/dev/shm/slimrl-test-{child}")
        time.sleep(0.02)
    raise AssertionError(f"the tree did not come up: {log.read_text()}")


def assert_gone(pids: list[int], *paths: Path) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (any(map(psutil.pid_exists, pids)) or any(p.exists() for p in paths)):
        time.sleep(0.02)
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    assert [path for path in paths if path.exists()] == []


def test_stop_ends_the_process_tree_and_removes_its_files(tmp_path):
    process = managed(tmp_path, TREE)
    process.start()
    pids, folder, memory = tree_of(process.log_path)
    assert memory.exists() and (folder / "left-over").exists()
    assert process.stop() == -signal.SIGKILL
    assert_gone([*pids, process.pid], folder, memory)


def test_stop_sends_sigterm_before_sigkill(tmp_path):
    process = managed(tmp_path, TREE)
    process.start()
    pids, folder, memory = tree_of(process.log_path)
    started = time.monotonic()
    assert process.stop(timeout_s=0.5) == -signal.SIGKILL
    assert time.monotonic() - started >= 0.5
    assert_gone(pids, folder, memory)


def test_child_that_exits_takes_its_tree_along_and_keeps_its_exit_code(tmp_path):
    process = managed(tmp_path, "import subprocess; subprocess.Popen(['sleep', '600']); raise SystemExit(7)")
    process.start()
    with pytest.raises(ProcessStartError, match="exit code 7"):
        process.wait_until(lambda: False, timeout_s=20)
    assert process.poll() == 7 and process.stop() == 7


def test_signal_that_ended_the_child_is_named(tmp_path):
    process = managed(tmp_path, "import os; print('last words', flush=True); os.kill(os.getpid(), 11)")
    process.start()
    with pytest.raises(ProcessStartError, match=r"exit code -11 \(SIGSEGV\).*\nlast words"):
        process.wait_until(lambda: False, timeout_s=20)


def test_second_start_shows_only_its_own_last_lines(tmp_path):
    process = managed(tmp_path, "print('again')")
    for _ in range(2):
        process.start()
        with pytest.raises(ProcessStartError, match="exit code 0"):
            process.wait_until(lambda: False, timeout_s=20)
    assert process.last_log_lines() == "again"
    assert process.log_path.read_text().splitlines() == ["again", "again"]


@pytest.mark.parametrize("how", ["SIGKILL", "exit", "thread", "stopped"])
def test_processes_end_with_their_parent_but_not_with_its_threads(tmp_path, how):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), how, TREE],
        env={**os.environ, "PYTHONPATH": str(Path(slimrl.__file__).parent.parent)},
        stdout=subprocess.PIPE,
        text=True,
    )
    pids, folder, memory = tree_of(tmp_path / "log")
    if how == "thread":  # the thread that called start() has ended: the server must keep running
        assert parent.stdout.readline() == "thread ended\n"
        time.sleep(0.3)
        assert all(map(psutil.pid_exists, pids))
    if how == "stopped":  # the kernel sends SIGHUP to a process group with a stopped process that loses its parent
        os.kill(pids[0], signal.SIGSTOP)
    if how != "exit":
        parent.kill()
    parent.wait(20)
    assert_gone(pids, folder, memory)


PARENT = """
import sys, threading, time
from pathlib import Path
from slimrl.processes import ManagedProcess
folder, how, tree = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
process = ManagedProcess([sys.executable, "-c", tree], name="x", log_path=folder / "log",
                         shared_memory_prefixes=["slimrl-test-"])
thread = threading.Thread(target=process.start)
thread.start()
thread.join()
print("thread ended", flush=True)
while how != "exit" or "tree" not in (folder / "log").read_text():
    time.sleep(0.05)
"""


def test_child_dies_with_a_killed_subreaper(tmp_path):
    process = managed(tmp_path, "import os, time; print('up', os.environ['TMPDIR'], flush=True); time.sleep(600)")
    process.start()
    process.wait_until(lambda: "up" in process.last_log_lines(), timeout_s=20)
    (child,) = psutil.Process(process.pid).children()
    os.kill(process.pid, signal.SIGKILL)
    assert_gone([child.pid])
    assert process.stop() == -signal.SIGKILL
    stale_resources.remove(process.last_log_lines().split()[1])  # what only the subreaper would have removed


def test_subreaper_without_a_parent_starts_nothing(tmp_path):
    program = Path(slimrl.__file__).parent / "processes" / "subreaper.py"
    gone = subprocess.Popen(["true"])
    gone.wait()
    marker = tmp_path / "started"
    command = [sys.executable, "-I", "-S", str(program), "--parent", str(gone.pid), "--", "touch", str(marker)]
    assert subprocess.run(command, timeout=20).returncode == 0
    assert not marker.exists()


def test_missing_command_is_reported(tmp_path):
    process = ManagedProcess(["/no/such/program"], name="test server", log_path=tmp_path / "log")
    process.start()
    with pytest.raises(ProcessStartError, match="exit code 127.*\n.*cannot run /no/such/program"):
        process.wait_until(lambda: False, timeout_s=20)


def test_watcher_wakes_for_a_new_file_and_not_for_a_written_one(tmp_path):
    (tmp_path / "old").touch()
    descriptor = subreaper.watch_folder(os.fspath(tmp_path))
    try:
        (tmp_path / "old").write_text("more")
        assert select.select([descriptor], [], [], 0.2)[0] == []
        (tmp_path / "new").touch()
        assert select.select([descriptor], [], [], 20)[0] == [descriptor]
    finally:
        os.close(descriptor)


def test_leftovers_of_a_killed_subreaper_are_removed_by_the_next_start(tmp_path, monkeypatch):
    private = tmp_path / "private"  # a run beside this test removes what it finds in the common temporary folder
    private.mkdir()
    monkeypatch.setenv("TMPDIR", str(private))
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    process = managed(tmp_path, TREE)
    process.start()
    pids, folder, memory = tree_of(process.log_path)
    deadline = time.monotonic() + 20
    while memory.name not in (folder / stale_resources.OWNER).read_text():  # it checks when a file appears
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for pid in (process.pid, *pids):
        os.kill(pid, signal.SIGKILL)
    process.poll()
    assert_gone(pids)
    assert memory.exists() and (folder / "left-over").exists()
    another = managed(tmp_path / "another", "print('here')")
    another.start()
    another.stop()
    assert_gone([], folder, memory)
