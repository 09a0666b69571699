"""docs/testing.md lists the tests that the suite skips by default, and the tests that replace them run."""

import ast
import contextlib
import re
import types
from pathlib import Path

import pytest

from tests.conftest import ExtendedTest, extended_tests, pytest_runtest_setup, rotated, unit_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/testing.md").read_text()
ROWS = extended_tests()


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def line(row: ExtendedTest) -> str:
    """The row as in docs/testing.md."""
    file, _, function = row.tests.partition("::")
    cases = "" if row.ids == ("*",) else f" ({', '.join(row.ids)})"
    return f"| `{file}`{': ' if function else ''}{function}{cases} | {row.seconds} | {row.instead} |"


def test_page_lists_the_extended_tests_with_their_durations():
    table = PAGE.partition("| left out |")[2].partition("\n\n")[0].splitlines()[2:]
    assert table == [line(row) for row in ROWS]
    minutes = round(sum(row.seconds for row in ROWS) / 60)
    assert f"Together they take {minutes} minutes" in PAGE


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.tests)
def test_replacement_of_an_extended_test_exists_and_runs(row):
    path = ROOT / row.tests.partition("::")[0]
    assert re.search(r"[a-z]", row.instead) and row.seconds > 0
    for file in re.findall(r"\btests/[\w/]+\.py", row.instead):
        assert (ROOT / file).is_file()
        assert not any(other.tests == file for other in ROWS), f"{file} is left out itself"
    for name in re.findall(r"(?<!/)\btest_\w+\b(?!\.py)", row.instead):
        where = [other for other in (path, *path.parent.glob("test_*.py")) if name in functions(other)]
        assert where, f"{name} is no test beside {path}"
        whole = (other.tests for other in ROWS if other.ids == ("*",))
        assert not any(test.endswith(f"::{name}") for test in whole), f"{name} is left out itself"


def test_row_names_a_file_a_function_or_some_of_its_cases():
    file, function = ExtendedTest("tests/a.py", 1, "x"), ExtendedTest("tests/a.py::test_b", 1, "x")
    cases = ExtendedTest("tests/a.py::test_b", 1, "x", ("c", "d-*"))
    named = [
        [row.has(f"tests/a.py::{test}") for row in (file, function, cases)]
        for test in ("test_b[c]", "test_b[d-1]", "test_b[e]", "test_c")
    ]
    assert named == [[True] * 3, [True] * 3, [True, True, False], [True, False, False]]
    assert not file.has("tests/aa.py::test_b[c]") and not function.has("tests/a.py::test_bb[c]")


def test_tests_of_a_file_go_to_one_worker_and_full_runs_of_all_files_too():
    assert unit_of("tests/data/test_x.py::test_y[tests/end_to_end/]") == "tests/data/test_x.py"
    runs = {unit_of(f"tests/end_to_end/{name}::test_y") for name in ("test_colocated.py", "test_failures.py")}
    assert runs == {unit_of("tests/scripts/test_ray.py::test_z")} == {"whole runs"}
    assert unit_of("tests/scripts/test_ray.py::test_z", extended=True) == "whole runs, extended"
    assert unit_of("tests/data/test_x.py::test_y", extended=True) != unit_of("tests/data/test_x.py::test_y")


@pytest.mark.parametrize(("until", "skipped"), [(None, False), ("0", True), ("1e12", False)])
def test_extended_test_is_skipped_only_after_the_time_for_it(until, skipped):
    class Item:
        config = types.SimpleNamespace(getoption=lambda _: None if until is None else float(until))

        def __init__(self, *marks: str) -> None:
            self._marks = marks

        def get_closest_marker(self, name: str) -> object:
            return name in self._marks

    pytest_runtest_setup(Item("slow"))
    with pytest.raises(pytest.skip.Exception) if skipped else contextlib.nullcontext():
        pytest_runtest_setup(Item("slow", "extended"))


def test_every_file_of_extended_tests_is_first_at_some_hour():
    files = [Path(f"tests/test_{number}.py") for number in range(101)]
    firsts = set()
    for hour in range(200):
        order = rotated(files, hour)
        assert sorted(order.values()) == list(range(101))
        first = min(order, key=order.__getitem__)
        assert order[files[(files.index(first) + 1) % 101]] == 1
        firsts.add(first)
    assert firsts == set(files)
    assert rotated([], 5) == {}
