"""Every benchmark can be started: it imports and prints its help."""

from __future__ import annotations

import importlib
import importlib.util
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.megatron import layouts
from tests.megatron.layouts import CP2, DYNAMIC, EP2, ETP2, PP2, SPREAD, TP2, TP2_SP, VIRTUAL, Layout, fsdp

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("program", PROGRAMS)
def test_benchmark_imports_and_prints_help(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(FOLDER / program), "--help"])
    # like `python benchmarks/<name>.py`: its own folder is first on the path, and its path changes are undone
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / program), run_name="__main__")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: {program}" in shown and f"python benchmarks/{program}" in shown


@pytest.fixture
def run(monkeypatch):
    """`benchmarks/run.py` as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("benchmarks_run", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("kept", "now", "outside"),
    [(2.0, 2.0, False), (2.0, 2.9, False), (2.0, 3.1, True), (2.0, 1.4, False), (2.0, 1.3, True), (None, 1.0, True)],
)
def test_a_ratio_that_leaves_its_band_on_either_side_is_marked(run, kept, now, outside):
    before = {"startup": {"a": kept}} if kept else {}
    (change,) = run.compare(before, {"startup": {"a": now}}, {"startup": 1.5})
    assert change.outside is outside


def test_a_kept_ratio_that_is_no_longer_measured_is_marked(run):
    changes = run.compare(
        {"startup": {"a": 1.0, "b": 1.0}, "grader": {"c": 1.0}}, {"startup": {"a": 1.0}}, {"startup": 1.5}
    )
    assert [(change.name, change.outside) for change in changes] == [("startup: a", False), ("startup: b", True)]


def test_a_benchmark_that_fails_is_named_and_the_others_are_measured(run, monkeypatch):
    def measure(benchmark, folder):
        if benchmark.program == "startup":
            raise RuntimeError("startup ended with exit code 1")
        return {"a": 2.0}

    monkeypatch.setattr(run, "measure", measure)
    ratios, failures = run.measure_all([run.Benchmark(name, [], 1.1) for name in ("startup", "grader")])
    assert (ratios, failures) == ({"grader": {"a": 2.0}}, ["startup ended with exit code 1"])


def test_ratios_are_written_and_read_and_must_be_positive_and_finite(run, tmp_path):
    ratios = importlib.import_module("ratios")  # next to run.py
    ratios.write_ratios(tmp_path / "ratios.json", {"a": 0.5})
    assert ratios.read_ratios(tmp_path / "ratios.json") == {"a": 0.5}
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive and finite"):
            ratios.write_ratios(None, {"a": wrong})


def test_model_of_many_engines_gives_the_measured_seconds_that_it_was_not_fitted_to(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    importlib.import_module("scale_model").compare()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert len(rows) == 12 and all(0.65 < float(row[-1]) < 1.35 for row in rows)


def test_driver_control_and_broadcast_cost_as_much_with_4096_engines_as_with_64(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    model = importlib.import_module("scale_model").model
    few, many = (model(engines, 2**30, 8, before=False) for engines in (64, 4096))
    assert many.driver_us <= few.driver_us and many.control_s <= few.control_s * 1.01
    assert many.manager_us <= few.manager_us * 1.01
    assert many.updates["broadcast"] <= few.updates["broadcast"] * 1.01
    before = model(4096, 2**30, 8, before=True)
    assert before.driver_us > 50 * many.driver_us and before.control_s > 50 * many.control_s
    assert before.updates["broadcast"] > 20 * many.updates["broadcast"]


def test_every_benchmark_of_the_set_exists(run):
    programs = {benchmark.program for benchmark in run.BENCHMARKS}
    assert {f"{program}.py" for program in programs} <= set(PROGRAMS)


def test_table_of_the_docs_has_the_rows_of_the_accuracy_benchmark_with_measured_numbers(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    accuracy = importlib.import_module("accuracy")
    section = (
        (FOLDER.parent / "docs/algorithms.md").read_text().partition("## Measured accuracy")[2].partition("\n## ")[0]
    )
    table = section[section.index(accuracy.HEADER) + len(accuracy.HEADER) :].strip().split("\n\n")[0].splitlines()
    without_numbers = [re.sub(r"\b\d\.\de-\d+ \(", "(", line) for line in table]
    assert without_numbers == [row.line({}) for row in accuracy.ROWS]
    assert [line for line, other in zip(table, without_numbers, strict=True) if line == other] == []
    for row in accuracy.ROWS:
        for test in row.tests:
            file, _, name = test.partition("::")
            assert f"def {name}(" in (FOLDER.parent / "tests" / file).read_text(), test


def names_of_cases(function: Any) -> set[str]:
    """The names that a test is parametrized with; empty if it goes through its layouts itself."""
    for mark in (mark for mark in function.pytestmark if mark.name == "parametrize"):
        arguments, values = mark.args
        arguments = [arguments] if isinstance(arguments, str) else list(arguments)
        for place in (arguments.index(name) for name in ("name", "case") if name in arguments):
            return {value if len(arguments) == 1 else value[place] for value in values}
    return set()


def test_layouts_in_the_table_of_the_docs_are_those_of_the_tests(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    checked = 0
    for row in (row for row in importlib.import_module("accuracy").ROWS if row.table):
        for test in row.tests:
            file, _, name = test.partition("::")
            function = getattr(importlib.import_module(f"tests.{file.removesuffix('.py').replace('/', '.')}"), name)
            if names := names_of_cases(function):
                assert names == set(row.table), test
                checked += 1
    assert checked > 20


@pytest.mark.parametrize(
    ("some", "summary"),
    [
        ([Layout(1, {})], "1"),
        ([Layout(1, DYNAMIC)], "1, 1 packed"),
        ([Layout(2, TP2)], "1: TP"),
        ([Layout(2, SPREAD)], "1: DP"),
        ([Layout(2, VIRTUAL | DYNAMIC, 4)], "1: PP VPP, 1 packed"),
        ([Layout(2, CP2), Layout(2, TP2_SP | DYNAMIC), Layout(1, DYNAMIC)], "3: TP SP CP, 2 packed"),
        ([Layout(2, EP2)], "1: EP"),  # the other rank has other experts
        ([Layout(4, EP2)], "1: DP EP"),
        ([Layout(4, ETP2 | PP2)], "1: TP SP PP ETP"),
        ([Layout(2, fsdp("optim"))], "1: FSDP"),
    ],
)
def test_kinds_of_parallelism_are_named(some: list[Layout], summary: str):
    assert layouts.summary_of(some) == summary
