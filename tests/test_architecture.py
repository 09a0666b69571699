"""The layers of docs/architecture.md: imports only go downwards, heavy packages stay in their wrappers; code style."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from slimrl.engines import backend

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {
    "platform": 0,
    "processes": 0,
    "data": 1,
    "algorithms": 1,
    "models": 1,
    "arguments": 1,
    "hooks": 1,
    "engines": 1,  # protocols, http and the table of engines; each engine is a separate package
    "rollout": 2,
    "observability": 2,
    "megatron": 3,
    "engines/sglang": 3,
    "engines/vllm": 3,
    "weights": 3,
    "compatibility": 3,
    "cluster": 4,
}
HEAVY = {
    "ray": "cluster",
    "megatron": "megatron",
    "sglang": "engines/sglang",
    "sglang_router": "engines/sglang",
    "vllm": "engines/vllm",
}
# the only place that imports engines: each inside a function, when its row is requested
TABLE_OF_ENGINES = ROOT / "slimrl/engines/backend.py"
ROWS_OF_ENGINES = {"slimrl.engines.sglang.backend", "slimrl.engines.vllm.backend"}
MOST_FILES_OF_A_FOLDER = 15
MOST_LINES_OF_A_FILE = 400
SOURCES = sorted((ROOT / "slimrl").rglob("*.py"))
TOOLS = sorted((ROOT / "tools").rglob("*.py"))


FOLDERS = sorted({path.parent for path in SOURCES})
ENGINES = [folder for folder in FOLDERS if folder.parent == ROOT / "slimrl/engines"]
LOOPS = [ROOT / "train.py", ROOT / "train_async.py"]
# modules for calls between driver, actors, engines and weight updates; sglang's patches are separate
EXPLICIT = [
    path
    for path in SOURCES
    if path.is_relative_to(ROOT / "slimrl/cluster")
    or path.is_relative_to(ROOT / "slimrl/weights/update")
    or path.parent == ROOT / "slimrl/engines"
]
OUTSIDE_ENGINES = [path for path in [*SOURCES, *TOOLS, *LOOPS] if ROOT / "slimrl/engines" not in path.parents]


def package_of(parts: tuple[str, ...]) -> str:
    """The package of a module, given by its path below slimrl: `engines/sglang` for ("engines", "sglang", "client")."""
    pair = "/".join(parts[:2])
    return pair if pair in LAYERS else parts[0]


def imports_of(path: Path) -> list[str]:
    """All imports anywhere, except the engine rows in functions of the table."""
    tree = ast.parse(path.read_text())
    names = imports_in(ast.walk(tree))
    if path == TABLE_OF_ENGINES:
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        for name in imports_in(node for function in functions for node in ast.walk(function)):
            if name in ROWS_OF_ENGINES:
                names.remove(name)
    return names


def imports_in(nodes: Iterable[ast.AST]) -> list[str]:
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module)
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_package_imports_only_from_its_own_layer_or_below(path):
    package = package_of(path.relative_to(ROOT / "slimrl").with_suffix("").parts)
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "slimrl" and len(parts) > 1 and package in LAYERS:
            imported = package_of(tuple(parts[1:]))
            layer = LAYERS.get(imported, 0)
            assert layer <= LAYERS[package], f"{package} imports {name} from a higher layer"
        if parts[0] in HEAVY and package in LAYERS:
            assert package == HEAVY[parts[0]], f"{package} imports {name}: only {HEAVY[parts[0]]} may"


@pytest.mark.parametrize("path", OUTSIDE_ENGINES, ids=lambda path: str(path.relative_to(ROOT)))
def test_engines_are_imported_only_through_the_table(path):
    tree = ast.parse(path.read_text())
    modules = imports_in(ast.walk(tree))
    members = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 0
        for alias in node.names
    ]
    engines = tuple(f"slimrl.engines.{folder.name}" for folder in ENGINES)
    assert [name for name in modules + members if name.startswith(engines)] == []


@pytest.mark.parametrize("path", EXPLICIT, ids=lambda path: str(path.relative_to(ROOT)))
def test_calls_between_processes_use_methods_and_not_strings(path):
    names = [node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)]
    defined = [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    assert not {"getattr", "methodcaller"} & set(names) and "__getattr__" not in defined


def test_table_has_every_engine():
    assert ENGINES and {folder.name for folder in ENGINES} == set(backend.ENGINES)
    imported = imports_in(ast.walk(ast.parse(TABLE_OF_ENGINES.read_text())))
    assert {f"slimrl.engines.{folder.name}.backend" for folder in ENGINES} == ROWS_OF_ENGINES <= set(imported)


def test_engine_flags_load_without_torch_and_engine_control_without_a_client():
    program = """
import sys
from slimrl.engines.backend import SGLANG, backend, passthrough_flags
assert set(passthrough_flags([])) == {"sglang", "vllm", "router"} and backend(SGLANG).packages
print([name for name in ("torch", "aiohttp", "ray", "sglang") if name in sys.modules])
assert backend(SGLANG).control.__name__ == "ServerControl"
print([name for name in ("aiohttp", "ray", "sglang") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["[]", "[]"], done.stderr


def test_no_import_cycle_between_packages():
    imported = {package: set() for package in LAYERS}
    for path in SOURCES:
        package = package_of(path.relative_to(ROOT / "slimrl").with_suffix("").parts)
        for name in imports_of(path):
            parts = name.split(".")
            if package in LAYERS and parts[0] == "slimrl" and len(parts) > 1:
                imported[package].add(package_of(tuple(parts[1:])))
    # an order in which every package comes after its imports; raises CycleError if there is none
    order = graphlib.TopologicalSorter({package: found - {package} for package, found in imported.items()})
    assert set(order.static_order()) >= set(LAYERS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_package_imports_no_tool_and_no_test(path):
    assert not [name for name in imports_of(path) if name.split(".")[0] in ("tools", "tests", "benchmarks")]


@pytest.mark.parametrize("path", [*SOURCES, *TOOLS], ids=lambda path: str(path.relative_to(ROOT)))
def test_file_length_is_limited(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES_OF_A_FILE


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_folder_size_is_limited(folder):
    assert len(list(folder.glob("*.py"))) <= MOST_FILES_OF_A_FOLDER


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_source_follows_the_style(command):
    ruff = Path(sys.executable).with_name("ruff")
    done = subprocess.run([ruff, *command.split(), ROOT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
