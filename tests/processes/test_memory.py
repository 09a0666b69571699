"""Resident memory of a process and its tree, against the allocated amount."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from slimrl.processes import process_info
from slimrl.processes.process_info import resident_gib

MIB = 1 / 1024
HOLDS = "import sys; held = bytearray(b'x') * (64 << 20); print('ready', flush=True); sys.stdin.read()"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLDS!r}])"


def test_own_rss_matches_psutil():
    assert resident_gib(with_children=False) == pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.02)


CHURNS = f"""
import subprocess, sys, threading
child = subprocess.Popen([sys.executable, "-c", {HOLDS!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print("ready", flush=True)
while True:
    threads = [threading.Thread(target=lambda: None) for _ in range(8)]
    for step in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            step(thread)
"""


@pytest.mark.slow
def test_child_is_counted_while_threads_of_its_parent_start_and_end():
    with subprocess.Popen([sys.executable, "-c", CHURNS], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "ready\n"
        amounts = [resident_gib(parent.pid) for _ in range(1500)]
        parent.kill()
    assert min(amounts) > 64 * MIB


def test_child_memory_counts_for_its_parent_until_it_ends():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout.readline() == "ready\n"
        alone, tree = resident_gib(parent.pid, with_children=False), resident_gib(parent.pid)
        assert 64 * MIB < tree - alone < 90 * MIB
        assert tree == pytest.approx(
            sum(p.memory_info().rss for p in [psutil.Process(parent.pid), *psutil.Process(parent.pid).children()])
            / 2**30,
            rel=0.02,
        )
        os.kill(parent.pid, 9)
        parent.stdin.close()
    assert resident_gib(parent.pid) == 0.0


@pytest.mark.parametrize(("limit", "free"), [("max", None), (str(2**40 * 64), None), (str(900 * 2**20), 500 * 2**20)])
def test_free_memory_is_that_of_the_container_if_it_has_less(tmp_path, monkeypatch, limit, free):
    """600 MiB are in use, 200 of them copies of files that nobody has used for long."""
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{600 * 2**20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\nactive_file 7\ninactive_file {200 * 2**20}\n")
    monkeypatch.setattr(process_info, "_CONTAINER_LIMIT", tmp_path / "memory.max")
    expected = psutil.virtual_memory().available if free is None else free
    assert process_info.free_memory() == pytest.approx(expected, rel=0.1)
