"""A second run in a folder is rejected by name; the lock of a dead run is ignored."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slimrl.processes.files import LOCK_NAME, FolderInUseError, only_run_in

HOLD = """
import sys
from slimrl.processes.files import only_run_in
with only_run_in(sys.argv[1], flag="--save", name="first"):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of `folder` until its input ends."""
    line = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.stdin.close()


def test_second_run_is_rejected_with_host_pid_and_start_of_the_first(tmp_path: Path):
    folder = tmp_path / "new" / "checkpoints"
    with holder(folder) as process:
        with pytest.raises(FolderInUseError) as refused, only_run_in(folder, flag="--save", name="second"):
            pass
        assert f"--save {folder} is used by another run (run first, process {process.pid} on" in str(refused.value)
        assert socket.gethostname() in str(refused.value) and "since 20" in str(refused.value)
    with only_run_in(folder, flag="--save", name="second"):
        pass
    assert list(folder.iterdir()) == []


def test_lock_of_a_killed_run_is_ignored(tmp_path: Path):
    with holder(tmp_path) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert (tmp_path / LOCK_NAME).read_text()
        with only_run_in(tmp_path, flag="--save", name="second"):
            assert '"second"' in (tmp_path / LOCK_NAME).read_text()


def test_lock_file_removed_by_its_holder_is_not_mistaken_for_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    flock, looked = fcntl.flock, []

    def removed_just_before(descriptor: int, operation: int) -> None:
        if not looked:
            (tmp_path / LOCK_NAME).unlink()
        looked.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_just_before)
    with only_run_in(tmp_path, flag="--save", name="x"):
        assert len(looked) == 2 and (tmp_path / LOCK_NAME).exists()


def test_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def none(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    with caplog.at_level(logging.WARNING), only_run_in(tmp_path, flag="--save", name="x"):
        pass
    assert f"--save {tmp_path} has no locks" in caplog.text


def test_folder_that_cannot_be_created_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(FolderInUseError, match=rf"--save {tmp_path}/file/x cannot be written: .*Not a directory"),
        only_run_in(tmp_path / "file" / "x", flag="--save", name="x"),
    ):
        pass
