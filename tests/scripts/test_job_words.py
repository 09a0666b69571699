"""Secrets in a job's flags: the submitted command does not contain them, and the program receives them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECRET = "s3ntinel"
PROGRAM = """
import json, os, sys
print(json.dumps({"words": sys.argv, "seen": open("/proc/self/cmdline").read(), "path": sys.path[0]}))
sys.exit(7)
"""


def submitted(words: list[str], folder: Path) -> list[str]:
    command = [sys.executable, str(ROOT / "scripts/lib/job_words.py"), str(folder)]
    given = b"".join(word.encode() + b"\0" for word in words)
    answer = subprocess.run(command, input=given, capture_output=True, check=True, timeout=30).stdout
    return answer.decode().split("\0")[:-1]


@pytest.mark.parametrize(
    "words",
    [
        ["env", "CUDA_VISIBLE_DEVICES=", "python3", "train.py", "--lr", "1e-3", "--run-name", "a b\n'c'", ""],
        ["python3", "-c", f"print('--wandb-key {SECRET}')"],
        ["true"],
    ],
)
def test_command_without_secrets_is_submitted_unchanged(words, tmp_path):
    assert submitted(words, tmp_path) == words
    assert list(tmp_path.iterdir()) == []


def test_program_gets_its_secrets_from_a_private_file_that_is_removed_at_start(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    flags = [
        "--lr",
        "1e-3",
        "--train-env-vars",
        json.dumps({"TOKEN": SECRET}),
        f"--wandb-key={SECRET}",
        "--name",
        "a b",
    ]
    words = submitted(["env", "A=1", sys.executable, "-u", str(program), *flags], tmp_path)
    assert SECRET not in " ".join(words)
    assert words[-7:] == ["--lr", "1e-3", "--train-env-vars", "***", "--wandb-key=***", "--name", "a b"]
    (file,) = tmp_path.glob("words-*")
    assert file.stat().st_mode & 0o777 == 0o600 and SECRET in file.read_text()
    done = subprocess.run(shlex.join(words), shell=True, capture_output=True, text=True, timeout=30)
    assert done.returncode == 7, done.stderr
    answer = json.loads(done.stdout)
    assert answer["words"] == [str(program), *flags]
    assert SECRET not in answer["seen"] and answer["path"] == str(tmp_path)
    assert not file.exists()


def test_command_that_cannot_be_prepared_ends_the_script_before_submission(tmp_path):
    script = """
    set -euo pipefail
    source scripts/lib/say.sh
    source scripts/lib/ray.sh
    RAY_FOLDER=$1 RAY_ADDRESS=http://127.0.0.1:1
    ray_job python3 train.py --wandb-key """
    command = ["bash", "-c", script + SECRET, "script", str(tmp_path / "gone")]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    *why, last = done.stderr.splitlines()
    assert last == "slimrl: the job's command could not be prepared; see above"
    assert "FileNotFoundError" in why[-1] and "usage:" not in done.stderr
