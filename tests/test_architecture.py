"""The layers of docs/architecture.md: imports run downwards only, heavy packages stay where they are wrapped; style."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {
    "platform": 0,
    "processes": 0,
    "data": 1,
    "algorithms": 1,
    "models": 1,
    "arguments": 1,
    "hooks": 1,
    "engines": 1,  # protocol and http; each engine is a package of its own
    "rollout": 2,
    "observability": 2,
    "megatron": 3,
    "engines/sglang": 3,
    "weights": 3,
    "compatibility": 3,
    "cluster": 4,
}
HEAVY = {"ray": "cluster", "megatron": "megatron", "sglang": "engines/sglang", "sglang_router": "engines/sglang"}
MOST_FILES_OF_A_FOLDER = 15
MOST_LINES_OF_A_FILE = 400
SOURCES = sorted((ROOT / "slimrl").rglob("*.py"))
TOOLS = sorted((ROOT / "tools").rglob("*.py"))


FOLDERS = sorted({path.parent for path in SOURCES})


def package_of(parts: tuple[str, ...]) -> str:
    """The package of a module, given as its path below slimrl: `engines/sglang` for ("engines", "sglang", "client")."""
    pair = "/".join(parts[:2])
    return pair if pair in LAYERS else parts[0]


def imports_of(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module)
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_imports_only_from_its_own_layer_or_below(path):
    package = package_of(path.relative_to(ROOT / "slimrl").with_suffix("").parts)
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "slimrl" and len(parts) > 1 and package in LAYERS:
            imported = package_of(tuple(parts[1:]))
            layer = LAYERS.get(imported, 0)
            assert layer <= LAYERS[package], f"{package} imports {name} from a higher layer"
        if parts[0] in HEAVY and package in LAYERS:
            assert package == HEAVY[parts[0]], f"{package} imports {name}: only {HEAVY[parts[0]]} may"


def test_no_two_packages_import_each_other():
    imported = {package: set() for package in LAYERS}
    for path in SOURCES:
        package = package_of(path.relative_to(ROOT / "slimrl").with_suffix("").parts)
        for name in imports_of(path):
            parts = name.split(".")
            if package in LAYERS and parts[0] == "slimrl" and len(parts) > 1:
                imported[package].add(package_of(tuple(parts[1:])))
    # the order in which every package comes after all that it imports; CycleError where there is none
    order = graphlib.TopologicalSorter({package: found - {package} for package, found in imported.items()})
    assert set(order.static_order()) >= set(LAYERS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_package_imports_no_tool_and_no_test(path):
    assert not [name for name in imports_of(path) if name.split(".")[0] in ("tools", "tests", "benchmarks")]


@pytest.mark.parametrize("path", [*SOURCES, *TOOLS], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_short_enough_to_read(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES_OF_A_FILE


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_folder_has_few_enough_files_to_see_at_once(folder):
    assert len(list(folder.glob("*.py"))) <= MOST_FILES_OF_A_FOLDER


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_the_source_keeps_the_style(command):
    ruff = Path(sys.executable).with_name("ruff")
    done = subprocess.run([ruff, *command.split(), ROOT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
