"""What a run is said to leave behind in shared memory, while other processes of the machine use theirs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end import harness

# ends without a clean-up, and nothing is left that would do it later
LEAVES = """
import multiprocessing, os, signal, sys, time
from multiprocessing import resource_tracker
semaphore = multiprocessing.get_context("spawn").Semaphore()
print(semaphore._semlock.name.lstrip("/"), flush=True)
time.sleep(float(sys.argv[1]))
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
os._exit(0)
"""
QUIET = "import time; time.sleep(1.5)"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(harness, "LEFT_WAIT", 0.5)
    monkeypatch.setattr(harness, "CLEAN_UP_WAIT", 0.2)


def run(folder: Path, *command: str) -> harness.Started:
    return harness.launch(
        [sys.executable, "-c", *command],
        log=folder / "log",
        run_dir=folder,
        cwd=folder,
        path="/usr/bin:/bin",
        home=folder,
    )


def test_a_left_semaphore_of_the_run_is_found_and_removed(tmp_path):
    done = run(tmp_path, LEAVES, "1.5").finish(60)
    name = f"sem.{done.output.split()[0]}"
    assert (done.code, done.left) == (0, [name])
    assert not Path("/dev/shm", name).exists()


def test_a_semaphore_of_another_living_process_is_not_counted(tmp_path):
    started = run(tmp_path, QUIET)
    with subprocess.Popen([sys.executable, "-c", LEAVES, "60"], stdout=subprocess.PIPE, text=True) as other:
        name = f"sem.{other.stdout.readline().strip()}"
        try:
            assert started.finish(60).left == []
            assert Path("/dev/shm", name).exists()
        finally:
            other.kill()


def test_a_file_that_a_process_from_before_the_run_leaves_is_not_counted(tmp_path):
    with subprocess.Popen([sys.executable, "-c", LEAVES, "0.7"], stdout=subprocess.PIPE, text=True) as other:
        name = f"sem.{other.stdout.readline().strip()}"
        started = run(tmp_path, QUIET)
    assert started.finish(60).left == []
    Path("/dev/shm", name).unlink()


def test_a_file_that_another_process_used_and_left_during_the_run_is_not_counted(tmp_path):
    started = run(tmp_path, QUIET)
    other = subprocess.run([sys.executable, "-c", LEAVES, "0.7"], capture_output=True, text=True, check=True)
    name = f"sem.{other.stdout.strip()}"
    assert started.finish(60).left == []
    assert Path("/dev/shm", name).exists()
    Path("/dev/shm", name).unlink()


def test_any_other_left_file_is_found(tmp_path):
    started = run(tmp_path, f"open('/dev/shm/slimrl-test-{time.time_ns()}', 'w').close(); {QUIET}")
    (left,) = started.finish(60).left
    assert left.startswith("slimrl-test-")
