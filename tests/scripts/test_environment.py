"""scripts/lib/environment.sh: which Python it uses, what it installs, when it does nothing, and its errors."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ["bash", "basename", "cat", "cut", "dirname", "awk", "df", "find", "flock", "grep", "mkdir", "rm", "sha256sum"]
PREPARE = (
    "set -euo pipefail; source scripts/lib/say.sh; source scripts/lib/environment.sh; prepare_environment;"
    ' command -v python; echo "$VIRTUAL_ENV"'
)
# An interpreter that reports version {version}, makes environments by copying itself, and records pip's arguments.
PYTHON = """#!/usr/bin/env bash
case "$*" in
   '-c ') ;;
   '-c import sys; sys.exit'*) (({version} == 311 || {version} == 312)) ;;
   '-c import ensurepip, venv') {can_make_venv} ;;
   '-c import sys; print'*) echo {version} ;;
   --version) echo Python 3.{minor}.0 ;;
   '-m venv '*)
      mkdir -p "$3/bin"
      cat "$0" >"$3/bin/python"
      chmod +x "$3/bin/python"
      echo "VIRTUAL_ENV=$3" >"$3/bin/activate"
      echo home >"$3/pyvenv.cfg"
      ;;
   '-m pip install --disable-pip-version-check --no-compile '*) shift 5; echo "$@" | tee -a "$PWD/pip"; {pip} ;;
   '-m compileall -q -j 0 '*) shift 5; echo "$@" >>"$PWD/compiled" ;;
   *) echo "unexpected: $*" >&2; exit 1 ;;
esac
"""


class Checkout:
    """A folder with the scripts and the locks; its PATH has the common tools and added interpreters."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder / "checkout", folder / "bin"
        for name in ("scripts", "requirements"):
            shutil.copytree(ROOT / name, self.folder / name)
        shutil.copy(ROOT / "setup.py", self.folder)
        self.bin.mkdir()
        for tool in [*TOOLS, "tee", "tail", "chmod", "env"]:
            (self.bin / tool).symlink_to(shutil.which(tool))

    def python(self, name: str, minor: int, *, can_make_venv: bool = True, pip: str = "true") -> None:
        program = PYTHON
        values = {"version": f"3{minor}", "minor": minor, "can_make_venv": str(can_make_venv).lower(), "pip": pip}
        for key, value in values.items():
            program = program.replace(f"{{{key}}}", str(value))
        (self.bin / name).write_text(program)
        (self.bin / name).chmod(0o755)

    def prepare(self, **environment: object) -> subprocess.CompletedProcess:
        variables = {"PATH": str(self.bin)} | {name: str(value) for name, value in environment.items()}
        command = [str(self.bin / "bash"), "-c", PREPARE, "scripts/setup.sh"]
        return subprocess.run(command, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=60)

    @property
    def pip_calls(self) -> list[str]:
        calls = self.folder / "pip"
        return calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


def refusal(done: subprocess.CompletedProcess) -> str:
    """The only line on stderr."""
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("slimrl: ")
    return sentence.removeprefix("slimrl: ")


def test_torch_is_installed_with_dependencies_and_the_rest_of_the_lock_without(checkout):
    checkout.python("python3", 12)
    done = checkout.prepare()
    assert done.returncode == 0, done.stderr
    assert checkout.pip_calls == [
        "-c requirements/cpu-py312.lock torch==2.13.0",
        "--no-deps -r requirements/cpu-py312.lock",
        "--no-deps --no-build-isolation -e .",
    ]
    venv = checkout.folder / ".venv"
    assert done.stdout.splitlines()[-2:] == [str(venv / "bin/python"), str(venv)]


def test_packages_and_checkout_are_compiled_once(checkout):
    checkout.python("python3", 12)
    for _ in range(2):
        assert checkout.prepare().returncode == 0
    assert (checkout.folder / "compiled").read_text() == f"{checkout.folder}/.venv/lib slimrl tools\n"


@pytest.mark.parametrize(("works", "calls_of_pip"), [(True, 0), (False, 3)])
def test_uv_installs_and_pip_does_where_it_fails(works, calls_of_pip, checkout):
    checkout.python("python3", 12)
    (checkout.bin / "uv").write_text(f'#!/usr/bin/env bash\necho "$@" >>"$PWD/uv"\n{str(works).lower()}\n')
    (checkout.bin / "uv").chmod(0o755)
    done = checkout.prepare()
    assert done.returncode == 0, done.stderr
    into = f"pip install --python {checkout.folder}/.venv/bin/python"
    assert (checkout.folder / "uv").read_text().splitlines() == [
        f"{into} -c requirements/cpu-py312.lock torch==2.13.0",
        f"{into} --no-deps -r requirements/cpu-py312.lock",
        f"{into} --no-deps --no-build-isolation -e .",
    ]
    assert len(checkout.pip_calls) == calls_of_pip


def test_second_setup_installs_and_prints_nothing(checkout):
    checkout.python("python3", 11)
    checkout.prepare()
    again = checkout.prepare()
    venv = checkout.folder / ".venv"
    assert again.stdout.splitlines() == [str(venv / "bin/python"), str(venv)]
    assert len(checkout.pip_calls) == 3


@pytest.mark.parametrize("file", ["setup.py", "requirements/cpu-py311.lock"])
def test_changed_requirements_are_installed_into_the_same_environment(file, checkout):
    checkout.python("python3", 11)
    checkout.prepare()
    (checkout.folder / ".venv/kept").touch()
    with open(checkout.folder / file, "a") as changed:
        changed.write("# changed\n")
    assert checkout.prepare().returncode == 0
    assert len(checkout.pip_calls) == 6
    assert (checkout.folder / ".venv/kept").exists()


def test_moved_checkout_gets_a_new_environment(checkout):
    checkout.python("python3", 11)
    checkout.prepare()
    checkout.folder = checkout.folder.rename(checkout.folder.with_name("elsewhere"))
    done = checkout.prepare()
    assert done.returncode == 0, done.stderr
    assert str(checkout.folder) in (checkout.folder / ".venv/bin/activate").read_text()
    assert len(checkout.pip_calls) == 6


def test_environment_of_another_checkout_gets_only_this_package_with_a_note(checkout, tmp_path):
    checkout.python("python3", 11)
    checkout.prepare()
    first = checkout.folder
    checkout.folder = tmp_path / "second"
    shutil.copytree(first, checkout.folder, ignore=shutil.ignore_patterns(".venv", "pip"))
    (checkout.folder / ".venv").symlink_to(first / ".venv")
    done = checkout.prepare()
    assert done.returncode == 0, done.stderr
    assert checkout.pip_calls == ["--no-deps --no-build-isolation -e ."]
    said, *places = done.stdout.splitlines()
    assert f"{first}/.venv was created by the checkout {first} and is switched to the slimrl of this one" in said
    assert places == [str(first / ".venv/bin/python"), str(first / ".venv")]
    assert checkout.prepare().stdout.splitlines() == places


def test_another_python_is_used_before_the_environment_exists(checkout):
    checkout.python("python3", 12)
    command = [str(checkout.bin / "bash"), "-c", PREPARE.replace("prepare_environment", "python_at_hand")]
    options = {"cwd": checkout.folder, "env": {"PATH": str(checkout.bin)}, "capture_output": True, "text": True}
    assert subprocess.run(command, **options, timeout=60).stdout.startswith(f"{checkout.bin}/python3\n")
    checkout.prepare()
    assert subprocess.run(command, **options, timeout=60).stdout.startswith(".venv/bin/python\n")


def test_failed_installation_shows_the_last_pip_lines_and_resumes_next_time(checkout):
    checkout.python("python3", 11, pip="echo no space left; [[ ! $* == *--no-deps* ]]")
    stopped = checkout.prepare()
    assert stopped.returncode == 1
    assert "no space left" in stopped.stderr
    assert "Run the same command again to continue" in stopped.stderr
    checkout.python("../checkout/.venv/bin/python", 11)
    assert checkout.prepare().returncode == 0
    assert checkout.pip_calls[-1] == "--no-deps --no-build-isolation -e ."


def test_first_suitable_python_on_the_path_is_used(checkout):
    checkout.python("python3.11", 11, can_make_venv=False)
    checkout.python("python3.12", 12)
    checkout.python("python3", 13)
    assert f"with {checkout.bin}/python3.12 (Python 3.12.0)" in checkout.prepare().stdout


def test_python_given_by_the_user_takes_precedence(checkout, tmp_path):
    checkout.python("python3", 11)
    checkout.python("mine", 12)
    assert f"with {checkout.bin}/mine (" in checkout.prepare(PYTHON=checkout.bin / "mine").stdout


def test_missing_python_is_one_error(checkout):
    sentence = refusal(checkout.prepare())
    assert sentence.startswith("needs Python 3.11 or 3.12, and the PATH has neither (python3 is missing); install one")


def test_unsuitable_python_is_named_with_its_version(checkout):
    checkout.python("python3", 13)
    assert "(python3 is Python 3.13.0); install one" in refusal(checkout.prepare())
    sentence = refusal(checkout.prepare(PYTHON="python3"))
    assert sentence.startswith("PYTHON=python3 is Python 3.13.0, but Python 3.11 or 3.12 is needed")
    assert "PYTHON=/no/such is no program, but" in refusal(checkout.prepare(PYTHON="/no/such"))


def test_python_without_venv_reports_what_to_install(checkout):
    checkout.python("python3.12", 12, can_make_venv=False)
    assert "apt install python3.12-venv" in refusal(checkout.prepare())


def test_insufficient_disk_space_is_rejected_at_the_start(checkout):
    checkout.python("python3", 11)
    (checkout.bin / "df").unlink()
    (checkout.bin / "df").write_text("#!/bin/sh\nprintf 'Filesystem\\ndisk 9 9 3145728 9%% /\\n'\n")
    (checkout.bin / "df").chmod(0o755)
    assert "has 3 GiB free, but the first installation needs 10 GiB" in refusal(checkout.prepare())
    assert checkout.pip_calls == []


def test_folder_with_other_files_is_never_cleared(checkout, tmp_path):
    checkout.python("python3", 11)
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years of work")
    assert "is not a Python environment and not empty" in refusal(checkout.prepare(VENV=precious))
    assert (precious / "thesis.tex").exists()


def test_folder_that_cannot_be_created_is_one_error(checkout, tmp_path):
    checkout.python("python3", 11)
    (tmp_path / "file").touch()
    assert "cannot create the folder" in refusal(checkout.prepare(VENV=tmp_path / "file/venv"))


def test_folder_name_with_a_space_is_rejected_before_installation(checkout, tmp_path):
    checkout.python("python3", 11)
    assert refusal(checkout.prepare(VENV=tmp_path / "my venv")).startswith("Ray cannot run from")
    assert checkout.pip_calls == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder_is_one_error(checkout, tmp_path):
    checkout.python("python3", 11)
    (tmp_path / "venv").mkdir(mode=0o555)
    assert "cannot write to" in refusal(checkout.prepare(VENV=tmp_path / "venv"))
