"""Runs side by side: rows, mean and spread over seeds, one picture."""

import statistics

import pytest

from slimrl.observability import report
from slimrl.observability.report import Outcome, group_of, mean_curve, rows, running_mean, seed_of
from slimrl.observability.run_log import RunLog, StepRecord
from slimrl.observability.summary import load_summary
from tests.observability.test_run_log import Result


def write(folder, reward: float, score: float, seed: int, steps: int = 20) -> dict:
    with RunLog(folder, versions={}) as log:
        log.evaluation("before", 0, {"addition": Result(0.4)})
        for step in range(steps):
            seconds = {"generate": 2.0, "train": 0.5, "total": 3.0}
            values = {"rollout/raw_reward": reward if step >= steps - 2 else reward / 2}
            log.step(StepRecord(step, str(step), values, [{"tokens": 200.0}], seconds))
        log.evaluation("after", steps, {"addition": Result(score)})
    file = folder / "summary.json"
    file.write_text(file.read_text().replace('"command": "', f'"command": "train.py --seed 9 --lr 1 --seed={seed} ', 1))
    return load_summary(folder)


@pytest.fixture
def three(tmp_path):
    """Two seeds of one setting, and another setting."""
    write(tmp_path / "base-seed0", 0.8, 0.9, 0)
    write(tmp_path / "base-seed1", 0.6, 0.7, 1)
    write(tmp_path / "other", 0.5, 0.5, 0)
    return [str(tmp_path / name) for name in ("base-seed0", "other", "base-seed1")]


def test_each_run_has_a_row_and_each_seed_group_a_mean_and_spread(three):
    table = rows([Outcome.of(load_summary(path)) for path in three])
    spread = f"{statistics.stdev([0.8, 0.6]):.3f}"
    assert table == [
        ["base-seed0", "0", "20", "0.800", "0.800", "0.400", "0.900", "0.900", "1.0", "3.00", "400"],
        ["base-seed1", "1", "20", "0.600", "0.600", "0.400", "0.700", "0.700", "1.0", "3.00", "400"],
        [
            *("base: mean of 2", "", "", f"0.700 ± {spread}", f"0.700 ± {spread}", "0.400 ± 0.000"),
            *(f"0.800 ± {spread}", f"0.800 ± {spread}", "1.0 ± 0.0", "3.00 ± 0.00", "400 ± 0"),
        ],
        ["other", "0", "20", "0.500", "0.500", "0.400", "0.500", "0.500", "1.0", "3.00", "400"],
    ]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("base-seed0", "base"),
        ("base_seed=12_long", "base_long"),
        ("base-s3", "base"),
        ("quickstart_attempt_2", "quickstart"),
        ("base.seed4_attempt_3", "base"),
        ("seed7", "seed7"),
        ("qwen3-4b", "qwen3-4b"),
        ("runs1", "runs1"),
    ],
)
def test_runs_are_grouped_by_name_without_seed_and_attempt(name, group):
    assert group_of(name) == group


@pytest.mark.parametrize(
    ("command", "seed"),
    [
        ("train.py --seed 1 --lr 2 --seed 5", "5"),
        ("train.py --seed=3", "3"),
        ("train.py --rollout-seed 4", None),
        ("a 'b", None),
    ],
)
def test_last_seed_of_the_command_is_used(command, seed):
    assert seed_of(command) == seed


def test_run_without_steps_or_evaluations_has_a_row_with_its_end_state(tmp_path):
    with pytest.raises(RuntimeError), RunLog(tmp_path / "broken", versions={}) as log:
        log.begin(0)
        raise RuntimeError("no server")
    (row,) = rows([Outcome.of(load_summary(tmp_path / "broken"))])
    assert row == ["broken", "-", "0 (failed)", "-", "-", "-", "-", "-", "0.0", "-", "-"]


def test_mean_curve_covers_the_common_steps():
    short, long = ([0, 1], [0.0, 1.0]), ([0, 1, 2], [1.0, 2.0, 9.0])
    assert mean_curve([short, long], list) == ([0, 1], [0.5, 1.5])
    assert mean_curve([([], []), long], running_mean) == ([], [])


def test_report_of_several_runs_is_one_table_and_one_picture(three, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.chdir(tmp_path)
    assert report.main(three) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["base-seed1", "1", "20", "0.600", "0.600", "0.400", "0.700", "0.700", "1.0", "3.00", "400"] in lines
    assert "the curves of 3 runs are in comparison.png" in [" ".join(line) for line in lines]
    data = (tmp_path / "comparison.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (1800, 675)
    assert report.main([*three, "--png", "own/name.png"]) == 0
    assert (tmp_path / "own/name.png").is_file()


def test_missing_run_among_several_is_one_error(three, tmp_path, capsys):
    assert report.main([*three, str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("there is no summary")
