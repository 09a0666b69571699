"""tests/gpu as a check of scripts/gpu_check.sh: counted as results arrive, ended in time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.gpu_check import machine

pytestmark = pytest.mark.slow

SUITE = """
import pytest
def test_right(): pass
def test_wrong(): assert 1 == 2
@pytest.mark.skip(reason="this check needs 2 GPUs and the machine has 1")
def test_skipped(): pass
def test_last(): pass
"""


def run_suite(folder: Path, text: str, seconds: float = 60) -> tuple[dict[str, Any], str]:
    """Runs a file of tests like those of tests/gpu; returns the results of the check, and its output."""
    (folder / "test_it.py").write_text(text)
    options = ["--rootdir", str(folder), "-c", "/dev/null", "-p", "no:timeout"]
    job = {
        "function": "tools.gpu_check.checks.suite:suite",
        "arguments": {"paths": [str(folder / "test_it.py")], "options": options},
        "seconds": seconds,
        "result": str(folder / "result.json"),
    }
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "tools.gpu_check.child", str(folder / "job.json")]
    done = subprocess.run(command, cwd=machine.ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "result.json").read_text()), done.stdout


def test_suite_counts_passed_failed_and_skipped(tmp_path: Path):
    found, output = run_suite(tmp_path, SUITE)
    assert found["done"] and any("test_wrong" in complaint for complaint in found["complaints"])
    assert {figure["name"]: figure["value"] for figure in found["figures"]} == {
        "passed": 2,
        "failed": 1,
        "skipped (this check needs 2 GPUs and the machine has 1)": 1,
    }
    assert "assert 1 == 2" in output


def test_suite_ends_between_two_tests_when_its_time_is_over(tmp_path: Path):
    found, _ = run_suite(tmp_path, SUITE, seconds=0)
    values = {figure["name"]: figure["value"] for figure in found["figures"]}
    assert values == {"passed": 1, "not run, the time was over": 3}
    assert found["complaints"] == []


def test_suite_of_only_skipped_tests_is_skipped_for_their_reason(tmp_path: Path):
    found, _ = run_suite(tmp_path, "import pytest\n@pytest.mark.skip(reason='no GPU')\ndef test_it(): pass\n")
    assert found["skipped"] == "no GPU" and found["complaints"] == []


def test_file_that_cannot_be_imported_fails(tmp_path: Path):
    found, output = run_suite(tmp_path, "import nothing_like_that\n")
    assert found["complaints"] == ["pytest ended with exit code 2"] and "nothing_like_that" in output


def test_results_are_written_after_every_test(tmp_path: Path):
    """The second test reads the results file as it is at that moment."""
    text = f"""
import json
from pathlib import Path
def test_right(): pass
def test_reads():
    found = json.loads(Path({str(tmp_path / "result.json")!r}).read_text())
    assert found["done"] is False
    values = {{figure["name"]: figure["value"] for figure in found["figures"]}}
    assert values == {{"passed": 1, "not run, the time was over": 1}}
"""
    found, output = run_suite(tmp_path, text)
    assert found["complaints"] == [], output
