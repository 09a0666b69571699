"""Asking another process for its current line: the correct line, and no harm to one that cannot answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slimrl.processes import importable, process_info

pytestmark = pytest.mark.slow

LISTENER = """
import threading, time
from slimrl.processes import process_info
process_info.enable_stack_dump()
def waits_in_a_thread():
    time.sleep(600)
def hangs():
    print("ready", flush=True)
    time.sleep(600)
threading.Thread(target=waits_in_a_thread, daemon=True).start()
hangs()
"""


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[tuple[subprocess.Popen, Path]]:
    script, log = tmp_path / "listener.py", tmp_path / "log"
    script.write_text(LISTENER)
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, str(script)], stdout=output, stderr=output, env={**os.environ, **importable()}
        )
    while "ready" not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.01)
    yield process, log
    process.kill()
    process.wait()


def test_hung_line_of_the_main_thread_is_named(listener):
    process, log = listener
    for _ in range(2):  # the second dump is distinguished from the first
        frames = process_info.frames_of(process.pid, log)
        file = log.with_name("listener.py")
        assert frames == [f"{file}:9 hangs", f"{file}:11 <module>"]
        assert "waits_in_a_thread" in log.read_text()
    assert process.poll() is None


def test_stopped_process_is_reported_without_frames(listener):
    process, log = listener
    process.send_signal(signal.SIGSTOP)
    while process_info.state(process.pid) != "stopped":
        time.sleep(0.01)
    assert process_info.frames_of(process.pid, log) == []


def test_process_without_a_signal_handler_is_left_alone(tmp_path):
    with subprocess.Popen(["sleep", "600"]) as process:
        assert process_info.frames_of(process.pid, tmp_path / "log") == []
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        process.kill()
    assert process_info.state(process.pid) == "gone"
    assert process_info.frames_of(process.pid, tmp_path / "log") == []
