"""The installed packages match the imports: setup.py, the locks and the source agree."""

import ast
import importlib.metadata
import itertools
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement

import slimrl

ROOT = Path(__file__).resolve().parent.parent
LOCKS = sorted((ROOT / "requirements").glob("cpu-*.lock"))  # those for GPUs: test_gpu_requirements.py
PINNED = {"torch", "megatron-core", "sglang", "sglang-router", "ray", "transformers"}
# import name -> name in the package index, where they differ
DISTRIBUTIONS = {
    "megatron": "megatron-core",
    "yaml": "pyyaml",
    "sglang_router": "sglang-router",
    "math_verify": "math-verify",
    "grpc": "grpcio",
    "xdist": "pytest-xdist",
    "PIL": "pillow",
}

# named in setup.py in brackets
EXTRAS = {"ray": "default", "math-verify": "antlr4_13_2"}
CUDA = re.compile(r"nvidia|cuda|cu1\d|triton|flashinfer|sgl-kernel|sglang-kernel")


def metadata() -> dict:
    with mock.patch("setuptools.setup") as setup:
        exec(
            compile((ROOT / "setup.py").read_text(), str(ROOT / "setup.py"), "exec"),
            {"__file__": str(ROOT / "setup.py")},
        )
    return setup.call_args.kwargs


def names(requirements: list[str]) -> dict[str, str]:
    """Normalised name -> version condition."""
    parsed = [re.fullmatch(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?\s*(.*)", line).groups() for line in requirements]
    return {re.sub(r"[-_.]+", "-", name).lower(): condition for name, condition in parsed}


def locked(path: Path) -> dict[str, str]:
    return names([line for line in path.read_text().splitlines() if line and not line.startswith("#")])


def test_version_is_defined_once():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in metadata() and "version" not in declared["project"]
    # tests/test_project_files.py builds the package: its version is this one
    assert declared["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "slimrl.__version__"}
    assert (ROOT / "slimrl/__init__.py").read_text().count(f'"{slimrl.__version__}"') == 1


def test_engines_are_pinned_to_the_versions_of_the_locks():
    required = names(metadata()["install_requires"])
    assert LOCKS
    for path in LOCKS:
        lock = locked(path)
        for name in PINNED:
            assert required[name] == lock[name] != ""


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_lock_pins_everything_and_has_no_cuda_package(path):
    for name, condition in locked(path).items():
        assert re.fullmatch(r"==[0-9][0-9A-Za-z.]*", condition), f"{name}{condition}"  # also no +cpu
        assert not CUDA.search(name)


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_lock_has_everything_setup_requires(path):
    asked = metadata()
    lock = locked(path)
    extras = itertools.chain(*(lines for name, lines in asked["extras_require"].items() if name != "gpu"))
    assert names([*asked["install_requires"], *extras]).keys() <= lock.keys()


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_lock_is_complete_except_for_cuda_and_sglang_requirements(path):
    """Like `pip check`: the lock has the declared requirements of its packages, at compatible versions."""
    lock = locked(path)
    version = path.stem.removeprefix("cpu-py3")
    for name in lock.keys() - {"sglang", "torch"}:
        extra = EXTRAS.get(name, "")
        python = {"python_version": f"3.{version}", "python_full_version": f"3.{version}.0", "extra": extra}
        for line in importlib.metadata.requires(name) or []:
            wanted = Requirement(line)
            other = re.sub(r"[-_.]+", "-", wanted.name).lower()
            if (wanted.marker is None or wanted.marker.evaluate(python)) and not CUDA.search(other):
                assert other in lock, f"{name} needs {wanted}"
                assert lock[other].removeprefix("==") in wanted.specifier, f"{name} needs {wanted}"


def imported(paths: Iterable[Path]) -> set[str]:
    """Package names of all imports of these files, except Python's and slimrl's own."""
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module.split(".")[0])
    found -= sys.stdlib_module_names | {"slimrl", "tools", "tests", "examples", "train", "train_async"}
    found -= {path.stem for folder in ("tools", "scripts/lib") for path in (ROOT / folder).glob("*.py")}
    found.discard("stale_resources")  # the subreaper starts in milliseconds and imports its neighbour this way
    # installed with SGLang and Megatron wherever there is CUDA, and replaced elsewhere
    found -= {"sgl_kernel", "transformer_engine", "triton"}
    return {re.sub(r"[-_.]+", "-", DISTRIBUTIONS.get(name, name)).lower() for name in found}


def test_setup_requires_every_package_the_source_imports():
    sources = [*(ROOT / "slimrl").rglob("*.py"), *(ROOT / "tools").rglob("*.py"), *ROOT.glob("train*.py")]
    sources += (ROOT / "scripts").rglob("*.py")
    # vLLM's own environment has what these import
    sources = [path for path in sources if not path.is_relative_to(ROOT / "slimrl/engines/vllm/environment")]
    asked = metadata()
    # one check of tools/gpu_check runs tests/gpu, and is skipped if pytest is not installed
    assert (
        imported(sources) - {"pytest"} <= names([*asked["install_requires"], *asked["extras_require"]["wandb"]]).keys()
    )


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_lock_has_the_imports_of_the_tests(path):
    found_otherwise = {"slime", "answer-format"}  # by slimrl.hooks.loader, and next to its importing module
    assert imported((ROOT / "tests").rglob("*.py")) - found_otherwise <= locked(path).keys()
