"""The floors of docs/architecture.md: imports run downwards only, heavy packages stay in their rooms; the style."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {
    "platform": 0,
    "processes": 0,
    "data": 1,
    "algorithms": 1,
    "arguments": 1,
    "hooks": 1,
    "rollout": 2,
    "observability": 2,
    "megatron": 3,
    "sglang": 3,
    "weights": 3,
    "compatibility": 3,
    "cluster": 4,
}
HEAVY = {"ray": {"cluster"}, "megatron": {"megatron"}, "sglang": {"sglang"}, "sglang_router": {"sglang"}}
SOURCES = sorted((ROOT / "slimrl").rglob("*.py"))
TOOLS = sorted((ROOT / "tools").rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "slimrl").parts
    return parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module)
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_from_its_own_floor_or_below(path):
    room = room_of(path)
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "slimrl" and len(parts) > 1 and parts[1] in FLOORS and room in FLOORS:
            assert FLOORS[parts[1]] <= FLOORS[room], f"{room} imports {name} from a higher floor"
        if parts[0] in HEAVY and room in FLOORS:
            assert room in HEAVY[parts[0]], f"{room} imports {name}: only {HEAVY[parts[0]]} may"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_package_imports_no_tool_and_no_test(path):
    assert not [name for name in imports_of(path) if name.split(".")[0] in ("tools", "tests", "benchmarks")]


@pytest.mark.parametrize("path", [*SOURCES, *TOOLS], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_small_enough_to_read(path):
    assert len(path.read_text().splitlines()) <= 500


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_the_source_keeps_the_style(command):
    ruff = Path(sys.executable).with_name("ruff")
    done = subprocess.run([ruff, *command.split(), ROOT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
