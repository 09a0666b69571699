"""How `scripts/test.sh` distributes the tests over its worker processes, and which tests its default run skips.

A file's tests stay together and in order, since they share fixtures. Files with slow tests come first, so that no
worker waits for a long one at the end. Full runs and tests with a Ray cluster run one at a time: they search for
leftover processes and files, and several at once would need more memory than a small machine has.
"""

from __future__ import annotations

import dataclasses
import fcntl
import fnmatch
import gc
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import hypothesis
import pytest

from slimrl.platform.launch_env import prepare_ray_environment

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from xdist.scheduler import LoadScopeScheduling
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"  # clusters of the tests may have several nodes
prepare_ray_environment()  # before any test module imports Ray, which then reads its access token
hypothesis.settings.register_profile("slimrl", deadline=None)  # examples are slow on a busy machine
hypothesis.settings.load_profile("slimrl")

ROOT = Path(__file__).resolve().parent.parent
WHOLE_RUNS = (
    "tests/end_to_end/",
    "tests/cluster/test_engine_over_nodes.py",
    "tests/cluster/test_moved_gpus.py",
    "tests/scripts/test_job_bodies.py",
    "tests/scripts/test_quickstart.py",
    "tests/scripts/test_ray.py",
    "tests/scripts/test_ray_nodes.py",
    "tests/scripts/test_rayjob.py",
    "tests/scripts/test_slurm_job.py",
)
PATIENCE = 2  # times the limits of whole runs and of tests, which fit a busy machine of today: others are slower
STEP = 37  # by which the order of extended tests is moved each hour
ON_OWN_MACHINES = "tests/end_to_end/test_machines.py"


@dataclasses.dataclass(frozen=True)
class ExtendedTest:
    """A row of extended.toml."""

    tests: str  # a file, or a function of it as pytest names it
    seconds: int
    instead: str
    ids: tuple[str, ...] = ("*",)

    def has(self, nodeid: str) -> bool:
        """Whether this row selects the test."""
        function, _, case = nodeid.partition("[")
        if self.tests not in (function, function.partition("::")[0]):
            return False
        return any(fnmatch.fnmatchcase(case.removesuffix("]"), pattern) for pattern in self.ids)


def extended_tests() -> list[ExtendedTest]:
    """The rows of extended.toml."""
    rows = tomllib.loads(Path(__file__).with_name("extended.toml").read_text())["tests"]
    return [ExtendedTest(**row | {"ids": tuple(row.get("ids", ["*"]))}) for row in rows]


def is_whole_run(nodeid: str) -> bool:
    """Whether the test must not meet others of its kind. Full runs on machines of their own do not meet the others."""
    return nodeid.startswith(WHOLE_RUNS) and nodeid.partition("::")[0] != ON_OWN_MACHINES


def unit_of(nodeid: str, *, extended: bool = False) -> str:
    """The unit of tests that one worker runs in sequence: those of a file, or of all files with full runs.

    The extended tests of a file, and those of all files with full runs, are units of their own, which come later.
    """
    unit = "whole runs" if is_whole_run(nodeid) else nodeid.partition("::")[0]
    return f"{unit}, extended" if extended else unit


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option of `.ci/run`."""
    parser.addoption(
        "--extended-until",
        type=float,
        metavar="TIME",
        help="skip extended tests that would start later (seconds since 1970, as printed by date +%%s)",
    )


WHOLE_RUNS_LOCK = pytest.StashKey[TextIO]()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the time limit of the test
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Runs one file with full runs at a time: the other worker may be at their extended tests.

    A file as a whole, since its fixtures keep processes between its tests.
    """
    stash = item.config.stash
    if is_whole_run(item.nodeid) and WHOLE_RUNS_LOCK not in stash:
        stash[WHOLE_RUNS_LOCK] = lock = open(item.config.cache.mkdir("whole_runs") / "lock", "w")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        return (yield)
    finally:
        if WHOLE_RUNS_LOCK in stash and (nextitem is None or nextitem.path != item.path):
            stash[WHOLE_RUNS_LOCK].close()
            del stash[WHOLE_RUNS_LOCK]


@pytest.hookimpl(tryfirst=True)  # before fixtures start anything
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips an extended test after --extended-until."""
    until = item.config.getoption("--extended-until")
    if until is not None and item.get_closest_marker("extended") and time.time() > until:
        pytest.skip("not run: the time for extended tests is over (--extended-until)")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # marks before pytest deselects by them, sorts after it has regrouped
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
    """Marks extended tests; sorts full runs first, then files with slow tests, then the others in pytest's order.

    Extended tests come last, because time may end; those of full runs, which take longest, before the others. With
    --extended-until another file of them is first in each hour, so that none is always left out.
    """
    rows = extended_tests()
    named: set[ExtendedTest] = set()
    for item in items:
        of_item = {row for row in rows if row.has(item.nodeid)}
        named |= of_item
        if limit := item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(PATIENCE * limit.args[0]), append=False)
        if of_item:
            assert item.get_closest_marker("slow"), f"{item.nodeid} of extended.toml is not marked slow"
            item.add_marker("extended")
    # --last-failed collects only the files with failed tests
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.getoption("lf")
    if whole and len(named) < len(rows):
        raise pytest.UsageError(f"extended.toml names no test: {[row.tests for row in rows if row not in named]}")
    result = yield
    slow_units = {unit_of(item.nodeid) for item in items if item.get_closest_marker("slow")}
    until = config.getoption("--extended-until")
    files = rotated(dict.fromkeys(item.path for item in items), 0 if until is None else int(until // 3600))

    def place(item: pytest.Item) -> tuple[bool, int, int]:
        rank = 0 if is_whole_run(item.nodeid) else 1 if unit_of(item.nodeid) in slow_units else 2
        extended = item.get_closest_marker("extended") is not None
        return extended, rank, files[item.path] if extended else 0

    items.sort(key=place)
    return result


def rotated(files: Iterable[Path], turn: int) -> dict[Path, int]:
    """The place of each file; every `turn` another one is first, and the others follow in their order."""
    order = list(files)
    first = (turn * STEP) % max(len(order), 1)
    return {file: (number - first) % len(order) for number, file in enumerate(order)}


def pytest_collection_finish() -> None:
    """Freezes what was imported and collected: garbage collections need not traverse it, which takes a tenth of CPU."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    """Sends a file, or all full runs, to one worker at a time."""
    from xdist.scheduler import LoadScopeScheduling

    rows = extended_tests()
    files = {row.tests.partition("::")[0] for row in rows}

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            extended = nodeid.partition("::")[0] in files and any(row.has(nodeid) for row in rows)
            return unit_of(nodeid, extended=extended)

    config.option.loadscopereorder = False  # in the order of `pytest_collection_modifyitems`
    return ByUnit(config, log)


@pytest.fixture(scope="session")
def additions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of tools/make_tiny_model.py with seed 0: made once for all workers, not to be changed."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    with open(base / "additions.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / "additions").exists():
            command = [
                sys.executable,
                ROOT / "tools/make_tiny_model.py",
                "--output-dir",
                base / "additions",
                "--seed",
                "0",
            ]
            subprocess.run(command, check=True, timeout=300)
    return base / "additions"
