"""The report of a run: numbers in the table, points in the plots, a picture in the file."""

import pytest

from slimrl.observability import report
from slimrl.observability.run_log import RunLog, StepRecord
from slimrl.observability.terminal import text_chart


class Result:
    def __init__(self, mean_reward: float) -> None:
        self.mean_reward = mean_reward

    def metrics(self) -> dict[str, float]:
        return {}


@pytest.fixture
def run_dir(tmp_path):
    with RunLog(tmp_path / "demo", versions={}) as log:
        log.evaluation("before", 0, {"addition": Result(0.4375)})
        for step in range(12):
            seconds = {"generate": 2.0, "train": 0.5, "update_weights": 0.25, "total": 3.0}
            train = [{"train_rollout_logprob_abs_diff_max": 2e-6}]
            log.step(StepRecord(step, str(step), {"rollout/raw_reward": 0.5 + step / 24}, train, seconds))
        log.evaluation("after", 12, {"addition": Result(0.9375)})
    return tmp_path / "demo"


def test_report_shows_results_durations_and_paths(run_dir, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert report.main([str(run_dir), "--model", "/models/new"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["run", "demo:", "12", "steps,", "completed"] in lines
    (result,) = [" ".join(line) for line in lines if line[:1] == ["completed:"]]
    assert result.startswith("completed: evaluation addition from 0.438 to 0.938, reward from 0.500 to 0.958, over 12")
    assert lines[-1][0] == "serve" and lines[-1][-4:] == ["--model-path", "/models/new", "--port", "30000"]
    assert ["evaluation", "addition", "0.438", "0.938"] in lines
    assert ["reward", "of", "the", "rollouts", "(first,", "last)", "0.500", "0.958"] in lines
    assert ["largest", "|train", "-", "rollout", "logprob|", "2.0e-06"] in lines
    assert ["generate", "2.00", "24.0"] in lines
    assert ["total", "3.00", "36.0"] in lines
    assert ["run", str(run_dir)] in lines


def test_picture_is_a_png_of_the_documented_size(run_dir, tmp_path):
    picture = tmp_path / "new" / "reward.png"
    assert report.main([str(run_dir / "summary.json"), "--png", str(picture)]) == 0
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (1600, 900)


def test_a_run_without_steps_or_evaluations_can_be_reported(tmp_path, capsys):
    with RunLog(tmp_path, versions={}):
        pass
    assert report.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "0 steps, completed" in printed
    assert "before" not in printed  # no table of results without results


@pytest.mark.parametrize("ages", [(1.0, 0.25), (0.0, 0.0)])
def test_staleness_is_reported_when_any_sample_is_stale(tmp_path, capsys, monkeypatch, ages):
    monkeypatch.setenv("COLUMNS", "140")
    with RunLog(tmp_path, versions={}) as log:
        for step, age in enumerate(ages):
            stale = {"mean": age, "max": 2.0 * age, "dropped": 3.0 * (age > 0)}
            rollout = {"rollout/raw_reward": 0.5, **{f"rollout/staleness/{name}": is_ for name, is_ in stale.items()}}
            log.step(StepRecord(step, str(step), rollout, [], {"total": 1.0}))
    assert report.main([str(tmp_path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    old = any(ages)
    assert ("staleness of the samples in rollouts (mean, largest) 0.62 2" in lines) is old
    assert ("stale groups regenerated 6" in lines) is old
    assert any("staleness of the samples" in line for line in lines) is old


def test_missing_or_foreign_file_is_one_error(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("there is no summary")
    (tmp_path / "summary.json").write_text("{}")
    assert report.main([str(tmp_path)]) == 2
    assert "is no summary of schema version 1" in capsys.readouterr().err


def test_ascii_plot_draws_a_rising_line_from_bottom_left_to_top_right():
    rows = text_chart([(0, 0.0), (10, 1.0)], width=29, height=5).splitlines()
    assert len(rows) == 7
    assert [len(row) for row in rows[:5]] == sorted((len(row) for row in rows[:5]), reverse=True)
    assert rows[0].startswith("      1 ┤")
    assert rows[4].startswith("      0 ┤⣀")
    assert rows[6].split() == ["0", "10"]


def test_markers_are_drawn_over_the_line():
    rows = text_chart([(0, 0.0), (10, 1.0)], [(0, 1.0), (10, 0.0)], width=29, height=5, mark="x").splitlines()
    assert rows[0][9] == "x"
    assert rows[4][-1] == "x"
    assert all(len(row) <= 29 for row in rows)


def test_flat_single_and_empty_lines_are_drawn():
    assert text_chart([]) == ""
    for line in ([(3, 0.5)], [(0, 0.5), (5, 0.5)]):
        rows = text_chart(line, height=5).splitlines()[:5]
        assert [any("⠀" < character <= "⣿" for character in row) for row in rows] == [False, False, True, False, False]


def test_report_has_skipped_steps_and_the_memory_of_every_process(tmp_path, capsys, monkeypatch, caplog):
    monkeypatch.setenv("COLUMNS", "140")
    seconds = {"generate": 2.0, "train": 0.5, "update_weights": 0.25, "total": 3.0}
    with RunLog(tmp_path / "demo", versions={}) as log, caplog.at_level("INFO", "slimrl"):
        for step, amount in enumerate((1.5, 3.25, 2.0)):
            train = [{"skipped": float(step == 1)}, {"skipped": float(step > 0)}]
            memory = {"driver_rss_gib": 0.25, "rank0_actor_rss_gib": amount}
            log.step(StepRecord(step, str(step), {"rollout/raw_reward": 0.5}, train, seconds, memory))
    assert ["SKIPPED 2 of 2 optimizer steps" in record.getMessage() for record in caplog.records] == [
        False,
        True,
        False,
    ]
    assert report.main([str(tmp_path / "demo")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["optimizer", "steps", "skipped", "(not", "finite)", "3"] in lines
    assert ["memory", "(GiB)", "first", "last", "peak"] in lines
    assert ["driver", "0.250", "0.250", "0.250"] in lines
    assert ["rank0", "actor", "1.500", "2.000", "3.250"] in lines
