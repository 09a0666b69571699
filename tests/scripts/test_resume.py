"""scripts/resume.sh: runs a recipe again after a loss, on the head's node and on the others."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Ends with the next of the given codes, the last one again and again, and counts its calls.
RECIPE = """
count=$(($(cat calls 2>/dev/null || echo 0) + 1)); echo "$count" >calls
codes=($CODES); index=$((count > ${#codes[@]} ? ${#codes[@]} : count))
echo "try $count, join within ${RAY_JOIN_TIMEOUT_S:-}"
exit "${codes[index - 1]}"
"""


def start(folder: Path, script: str, *options: str, **variables: str) -> subprocess.Popen:
    command = ["bash", str(ROOT / "scripts/resume.sh"), *options, "--", "bash", "-c", script]
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(folder: Path, codes: str, *options: str, **variables: str) -> tuple[int, int, str]:
    """The exit code, the number of tries and the output for a recipe that ends with these codes."""
    process = start(folder, RECIPE, *options, CODES=codes, **variables)
    said, _ = process.communicate(timeout=30)
    return process.returncode, int((folder / "calls").read_text()), said


@pytest.mark.parametrize(
    ("codes", "options", "code", "tries"),
    [
        ("0", [], 0, 1),
        ("75 75 0", [], 0, 3),  # lost twice
        ("137 0", [], 0, 2),  # killed, for example for want of memory
        ("1", [], 1, 1),  # would fail again
        ("2", [], 2, 1),  # refused flags
        ("143", [], 143, 1),  # somebody stopped the job
        ("75", ["--max-restarts", "2"], 75, 3),
        ("75", ["--max-restarts", "0"], 75, 1),
    ],
)
def test_head_tries_again_only_after_a_loss(codes, options, code, tries, tmp_path):
    assert ended(tmp_path, codes, *options)[:2] == (code, tries)
    (tmp_path / "calls").unlink()
    assert ended(tmp_path, codes, *options, RANK="0")[:2] == (code, tries)


@pytest.mark.parametrize(
    ("codes", "code", "tries"),
    [
        ("1", 1, 1),  # other versions than the head's
        ("0", 0, 1),  # the run has ended
        ("69", 69, 2),  # there was no head, and the second try found none either
        ("69 75 0", 0, 3),  # it came late, and was lost once
        ("75 69", 0, 2),  # joined; the head or Ray on this node was lost, and no other head appeared
        ("75 75 75 69", 0, 4),  # three heads
        ("75 75 0", 0, 3),  # the third one came to the end
        ("75 1", 1, 2),  # the next head has other versions
    ],
)
def test_other_nodes_join_each_try_of_the_head(codes, code, tries, tmp_path):
    ended_with, calls, said = ended(tmp_path, codes, "--rejoin-timeout-s", "7", RANK="1", RAY_JOIN_TIMEOUT_S="900")
    assert (ended_with, calls) == (code, tries)
    assert "try 1, join within 900" in said
    if "75" in codes.split()[:-1]:
        assert f"try {tries}, join within 7" in said


@pytest.mark.parametrize(("rank", "code"), [("0", 143), ("1", 0)])
@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_reaches_the_recipe_and_ends_without_another_try(name, rank, code, tmp_path):
    script = "trap 'kill $!; sleep 0.3; exit 143' TERM; echo ready; sleep 30 & wait"
    process = start(tmp_path, script, RANK=rank)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(name)
    began = time.monotonic()
    said, _ = process.communicate(timeout=20)
    assert process.returncode == code and time.monotonic() - began < 15
    assert "restart" not in said


def test_node_that_waits_for_another_head_ends_well_on_a_signal(tmp_path):
    """As when a scheduler ends the other nodes after the end of the head."""
    first = "if [[ ! -e joined ]]; then touch joined; exit 75; fi"
    script = f"{first}; trap 'kill $!; exit 143' TERM; echo waiting; sleep 30 & wait"
    process = start(tmp_path, script, RANK="1")
    lines = iter(process.stdout.readline, "")
    assert "waiting\n" in lines  # reads no further
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and "the node with RANK 0 reports the outcome" in said


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--max-restarts", "many", "--", "true"], "--max-restarts many is not a number of restarts"),
        (["--rejoin-timeout-s", "0", "--", "true"], "--rejoin-timeout-s 0 is not a number of seconds"),
        (["--max-restarts"], "--max-restarts needs a value"),
        (["true"], "unknown option true"),
        (["--"], "no command: give it after --"),
    ],
)
def test_bad_options_are_refused(options, sentence, tmp_path):
    command = ["bash", str(ROOT / "scripts/resume.sh"), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and sentence in done.stderr
