"""Scripts check flags first: an invalid line creates, starts and deletes nothing."""

import os
import resource
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPU_SECONDS = 2.0
MISSPELT = [
    "train.py: 1 problem with the command line; nothing was started.",
    "  1. unknown flag --num-rollot: did you mean --num-rollout?",
]


def environment(**more: str) -> dict[str, str]:
    """The tests' own Python first, and a path where no environment can be created: it must not be needed that early."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "VENV": "/dev/null/venv", "TMPDIR": "/tmp", **more}


def run(*command: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, env=environment(**variables), capture_output=True, text=True, timeout=120)


@pytest.fixture
def name():
    """The name of an existing run with some content."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    folder = ROOT / "runs" / name
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text("{}")
    yield name
    assert (folder / "summary.json").read_text() == "{}", "an earlier run was touched"
    (folder / "summary.json").unlink()
    folder.rmdir()
    assert not list((ROOT / "runs").glob(f"*{name}*")), "something was made"


def test_quickstart_rejects_a_misspelled_flag_immediately(name):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    refused = run("bash", "scripts/quickstart.sh", "--run-name", name, "--", "--num-rollot", "5")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert refused.returncode == 2
    assert refused.stdout == "" and refused.stderr.splitlines() == MISSPELT
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < CPU_SECONDS


def test_recipe_rejects_a_misspelled_flag_immediately_as_toy_and_in_a_cluster():
    toys = set((ROOT / "runs").glob("run-*"))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    toy = run("bash", "scripts/run-qwen3-30B-A3B.sh", "--tiny", "--num-rollot", "5")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < CPU_SECONDS
    cluster = run("bash", "scripts/run-qwen3-4B.sh", "--num-rollot", "5", RAY_ADDRESS="http://127.0.0.1:1")
    for refused in (toy, cluster):
        assert refused.returncode == 2
        assert refused.stdout == "" and refused.stderr.splitlines() == MISSPELT
    assert set((ROOT / "runs").glob("run-*")) == toys


def test_recipe_reports_every_missing_file_with_the_misspelled_flag(tmp_path):
    refused = run("bash", "scripts/run-qwen3-4B.sh", "--num-rollot", "5", BASE=str(tmp_path))
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr.startswith("train.py: 5 problems with the command line")
    assert "did you mean --num-rollout?" in refused.stderr and f"--ref-load {tmp_path}/Qwen3-4B_torch" in refused.stderr


def test_recipe_without_an_environment_names_the_setup_command(tmp_path):
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    refused = run("bash", "scripts/run-qwen3-4B.sh", "--tiny", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert refused.returncode == 1 and refused.stdout == ""
    (sentence,) = refused.stderr.splitlines()
    assert sentence.startswith(f"slimrl: {tmp_path}/python3 has no Ray: run bash scripts/setup.sh once")


def test_recipe_in_the_environment_of_another_checkout_warns_and_runs_its_own_code(tmp_path):
    other = tmp_path / "other/slimrl"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('the code of another checkout ran')\n")
    refused = run("bash", "scripts/run-qwen3-4B.sh", "--tiny", "--num-rollot", "5", PYTHONPATH=str(other.parent))
    assert refused.returncode == 2 and refused.stderr.splitlines() == MISSPELT
    (line,) = refused.stdout.splitlines()
    assert f"the environment has the slimrl of another checkout, {other.parent}; this run uses that of {ROOT}" in line


@pytest.mark.slow
def test_toy_dry_run_ends_with_the_plan_exit_code_and_leaves_nothing(tmp_path):
    toys = set((ROOT / "runs").glob("run-*"))
    planned = run(
        "bash",
        "scripts/run-qwen3-30B-A3B.sh",
        "--tiny",
        "--dry-run",
        "--gpu-memory-gib",
        "0.001",
        TMPDIR=str(tmp_path),
    )
    assert planned.returncode == 2
    assert planned.stdout.count("Plan of train.py: nothing is started.") == 1
    assert planned.stderr.count("1. training needs") == 1
    assert "Ray" not in planned.stdout + planned.stderr
    assert set((ROOT / "runs").glob("run-*")) == toys
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")] == []


def test_run_takes_the_first_free_name(tmp_path):
    command = 'source scripts/lib/flags.sh; free_name "$1" quickstart'
    for expected in ("quickstart", "quickstart_attempt_2", "quickstart_attempt_3"):
        found = run("bash", "-euc", command, "script", str(tmp_path)).stdout.strip()
        assert found == expected
        (tmp_path / found).mkdir()


def test_script_shows_the_help_of_the_entry_point():
    shown = run("bash", "scripts/quickstart.sh", "--async", "--", "--help")
    assert shown.returncode == 0 and "train_async.py" in shown.stdout
