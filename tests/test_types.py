"""mypy finds no errors with the settings of pyproject.toml, and ignores are few and name their error."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
STRICT = {"slimrl.algorithms.*", "slimrl.arguments.*", "slimrl.data.*", "slimrl.weights.*"}
MOST_IGNORES = 25


def checked_files() -> list[Path]:
    paths = [ROOT / name for name in SETTINGS["files"]]
    return [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed: see the locks")
def test_type_check_passes():
    """Some 60 s without the folder .mypy_cache, which git ignores, and 3 to 20 s with it."""
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def test_four_packages_are_checked_strictly():
    (strict,) = [table for table in SETTINGS["overrides"] if "disallow_untyped_defs" in table]
    assert set(strict["module"]) == STRICT
    lenient = [table for table in SETTINGS["overrides"] if table.get("strict_optional") is False]
    assert not STRICT & {module for table in lenient for module in table["module"]}


def test_ignores_are_few_and_name_their_error():
    found = [line for path in checked_files() for line in path.read_text().splitlines() if "type: ignore" in line]
    assert [line for line in found if not re.search(r"# type: ignore\[[a-z-]+\]", line)] == []
    assert len(found) <= MOST_IGNORES
