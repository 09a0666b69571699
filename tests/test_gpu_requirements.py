"""The GPU recipe of docs/install.md: its lock, its Dockerfile, and that the package index still has the packages."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
PYTHONS = ("311", "312")
DOCKERFILE = ROOT / "docker" / "Dockerfile"
PLATFORM = "x86_64-manylinux_2_34"  # the oldest with SGLang wheels
COMPILED = "transformer-engine-torch"  # has no wheel: installed after the lock
# Not at the version tested on CPUs: SGLang's gRPC packages (smg-grpc-servicer) need protobuf 6.
OTHER_THAN_ON_CPUS = {"protobuf"}
NO_NETWORK = re.compile(r"error sending request|dns error|timed out|Connection refused|Failed to fetch|Network", re.I)


def setup_arguments() -> dict:
    source = (ROOT / "setup.py").read_text()
    with mock.patch("setuptools.setup") as setup:
        exec(compile(source, str(ROOT / "setup.py"), "exec"), {"__file__": str(ROOT / "setup.py")})
    return setup.call_args.kwargs


def wanted() -> list[str]:
    """All requirements of setup.py, with its extras."""
    asked = setup_arguments()
    return [*asked["install_requires"], *(line for extra in asked["extras_require"].values() for line in extra)]


def locked(name: str) -> dict[str, str]:
    lines = [line.strip() for line in (REQUIREMENTS / name).read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.fixture(params=PYTHONS)
def python(request) -> str:
    return request.param


@pytest.fixture
def lock(python) -> dict[str, str]:
    return locked(f"gpu-py{python}.lock")


def test_lock_has_everything_setup_requires(lock):
    for line in map(Requirement, wanted()):
        assert lock[canonicalize_name(line.name)] in line.specifier, str(line)


def test_versions_match_the_cpu_test_environment(python, lock):
    on_cpus = locked(f"cpu-py{python}.lock")
    assert on_cpus.keys() <= lock.keys()
    assert {name for name, version in on_cpus.items() if lock[name] != version} == OTHER_THAN_ON_CPUS


def test_lock_satisfies_sglang_except_for_the_override(python, lock):
    machine = {"python_version": f"3.{python[1:]}", "python_full_version": f"3.{python[1:]}.0", "extra": ""}
    unmet = set()
    for line in map(Requirement, importlib.metadata.requires("sglang")):
        if line.marker is None or line.marker.evaluate(machine):
            name = canonicalize_name(line.name)
            unmet |= {name} if lock.get(name) not in line.specifier else set()
    assert unmet == {"cuda-tile"}
    assert f"\ncuda-tile=={lock['cuda-tile']}\n" in (REQUIREMENTS / "gpu-overrides.txt").read_text()


def test_transformer_engine_fits_megatron_and_the_torch_cuda(lock):
    (allowed,) = {
        line.specifier
        for line in map(Requirement, importlib.metadata.requires("megatron-core"))
        if line.name == "transformer-engine"
    }
    assert lock["transformer-engine"] in allowed
    assert lock["transformer-engine-cu13"] == lock["transformer-engine"]
    # the same file in an environment with the CUDA 13 library
    assert "transformer-engine-cu12" not in lock
    assert COMPILED not in lock
    assert lock["nvidia-cuda-runtime"].startswith("13.0.")


# -- the image -----------------------------------------------------------------------------------------------------


def program(name: str) -> str:
    """The program `name`, next to the interpreter or on the PATH; skips the test if it is missing."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: pip install -e '.[dev]'")
    return found


def test_dockerfile_linter_reports_nothing():
    linted = subprocess.run([program("hadolint"), str(DOCKERFILE)], capture_output=True, text=True, timeout=60)
    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_image_has_the_cuda_and_python_of_the_lock():
    text = DOCKERFILE.read_text()
    (cuda,) = re.findall(r"^FROM nvidia/cuda:(\d+\.\d+)\.\d+-devel-ubuntu24\.04$", text, re.MULTILINE)
    (name,) = set(re.findall(r"requirements/(gpu-py3\d+\.lock)", text))
    assert locked(name)["nvidia-cuda-runtime"].startswith(f"{cuda}.")
    (python,) = set(re.findall(r"python3\.(\d+)", text))
    assert name == f"gpu-py3{python}.lock"
    for source in re.findall(r"^COPY (\S+) ", text, re.MULTILINE):
        assert (ROOT / source).exists()


def pip_commands(text: str) -> list[str]:
    joined = re.sub(r" +#.*", "", re.sub(r"\s*\\\n\s*", " ", text))
    return [re.sub(r"py31[12]", "py312", found).strip() for found in re.findall(r"pip (install --no-deps .*)", joined)]


def test_guide_and_image_install_the_same():
    (section,) = re.findall(r"^## A machine with GPUs\n(.*?)^## ", guide(), re.MULTILINE | re.DOTALL)
    assert pip_commands(section) == pip_commands(DOCKERFILE.read_text()) != []
    (engine,) = {line for line in wanted() if line.startswith("transformer-engine[")}
    assert f"--no-build-isolation {COMPILED}=={engine.partition('==')[2]}" in section


def guide() -> str:
    return (ROOT / "docs" / "install.md").read_text()


# -- the package index ---------------------------------------------------------------------------------------------


def index_options() -> list[str]:
    """Options that point uv to the index that pip uses here; empty for the default index."""
    url = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("PIP_INDEX_URL")
    if not url:
        command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
        url = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    return ["--default-index", url] if url else []


def resolve(python: str, *arguments: str, folder: Path) -> None:
    """`uv pip compile` in `folder`/work for the platform of the recipe; skips if no index answers."""
    command = [program("uv"), "pip", "compile", "--quiet", "--no-config", "--cache-dir", str(folder / "cache")]
    command += [*index_options(), "--python-version", f"3.{python[1:]}", "--python-platform", PLATFORM]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=240, cwd=folder / "work")
    if done.returncode != 0 and NO_NETWORK.search(done.stderr):
        pytest.skip(f"no package index answers: {done.stderr.strip().splitlines()[0]}")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_lock_matches_the_index_and_every_package_has_a_wheel(python, tmp_path):
    lock = REQUIREMENTS / f"gpu-py{python}.lock"
    work = tmp_path / "work"
    work.mkdir()
    (work / "wanted.in").write_text("\n".join(wanted()))
    resolved = work / "resolved.lock"
    resolved.write_text(lock.read_text())  # uv keeps these versions unless there is a conflict
    resolve(
        *(python, "wanted.in", "--output-file", resolved.name, "--no-annotate", "--no-header"),
        *("--override", str(REQUIREMENTS / "gpu-overrides.txt"), "--no-emit-package", COMPILED),
        *("--only-binary", ":all:", "--no-binary", COMPILED),
        folder=tmp_path,
    )
    packages = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    assert resolved.read_text().split() == packages
