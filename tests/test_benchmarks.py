"""Every benchmark can still be started: it imports, and it says how it is called."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_benchmark_imports_and_explains_itself(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(FOLDER / program), "--help"])
    # as `python benchmarks/<name>.py` starts it: its own folder comes first, and what it adds to the path is taken away
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / program), run_name="__main__")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: {program}" in shown and f"python benchmarks/{program}" in shown
