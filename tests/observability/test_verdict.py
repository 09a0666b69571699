"""The final lines of a run: its result or how it ended, and commands to type."""

import contextlib
import datetime
import json
import os
import shlex
from pathlib import Path

import pytest

from slimrl.arguments import read_args
from slimrl.observability.run_log import RunLog, StepRecord
from slimrl.observability.summary import final_message, load_summary, newest_dump, next_commands, outcome_line
from tests.observability.test_run_log import Result

ROOT = Path(__file__).resolve().parents[2]


def write(
    folder: Path,
    rewards: list[float],
    scores: list[float] = (),
    error: type | None = None,
    supervised: bool = False,
    **paths,
) -> dict:
    """A finished run with one step per reward, and evaluations before, between and after; an `error` ends it."""
    places = {name: str(path) for name, path in paths.items()}
    with contextlib.suppress(error or ()), RunLog(folder, versions={}, supervised=supervised, paths=places) as log:
        log.begin(0)
        for number, score in enumerate(scores):
            log.evaluation("before" if number == 0 else number, number, {"addition": Result(score)})
        for step, reward in enumerate(rewards):
            train = [{"loss": 2.0 / (step + 1)}]
            log.step(StepRecord(step, str(step), {"rollout/raw_reward": reward}, train, {"total": 90.0}))
        if error is not None:
            raise error("no server")
    return load_summary(folder)


def ended_after(summary: dict, seconds: int) -> dict:
    started = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    ended = started + datetime.timedelta(seconds=seconds)
    summary["run"] |= {"started": started.isoformat(), "ended": ended.isoformat()}
    return summary


def test_learning_run_reports_its_gain_range_and_duration(tmp_path):
    summary = ended_after(write(tmp_path, [0.5859, 0.7, 0.9727], [0.3984, 0.8, 1.0]), 84)
    assert outcome_line(summary) == (
        "completed: evaluation addition from 0.398 to 1.000, reward from 0.586 to 0.973, over 3 steps in 1.4 min"
    )


@pytest.mark.parametrize(
    ("rewards", "scores", "expected"),
    [
        ([0.25], [], "completed: reward 0.250, over 1 step in 42 s"),
        ([0.0, 0.0], [], "completed: reward from 0.000 to 0.000, over 2 steps in 42 s"),
        ([], [0.5], "completed: evaluation addition 0.500, over 0 steps in 42 s"),
        ([], [], "completed: after 0 steps in 42 s"),
    ],
)
def test_runs_without_rewards_evaluations_or_steps_have_a_result_line(rewards, scores, expected, tmp_path):
    assert outcome_line(ended_after(write(tmp_path, rewards, scores), 42)) == expected


def test_supervised_run_reports_its_loss(tmp_path):
    summary = ended_after(write(tmp_path, [0.0, 0.0], supervised=True), 42)
    expected = "completed: loss from 2.000 to 1.000, over 2 steps in 42 s"
    assert outcome_line(summary) == expected
    del summary["run"]["supervised"]  # as earlier versions wrote it
    assert outcome_line(summary) == expected


@pytest.mark.parametrize(
    ("loss", "supervised"),
    [("sft_loss", True), ("preference_loss", True), ("policy_loss", False), ("custom_loss", False)],
)
def test_run_kind_follows_from_its_loss(loss, supervised, tmp_path):
    args = read_args(["--loss-type", loss, "--run-name", "one", "--runs-dir", str(tmp_path)])[0]
    with RunLog.open(args, versions={}) as log:
        log.begin(0)
    assert load_summary(args.run_dir)["run"]["supervised"] is supervised


def test_failed_run_reports_it_and_lists_the_logs_first(tmp_path):
    summary = write(tmp_path, [0.5, 0.5], error=RuntimeError)
    assert outcome_line(summary).startswith("failed: reward from 0.500 to 0.500, over 2 steps in")
    first, second = next_commands(summary)
    assert first.split() == ["logs", "tail", "-n", "50", f"{tmp_path}/logs/*.log"]
    assert second.split()[:2] == ["report", "python"]


def test_interrupted_and_killed_runs_are_distinguished(tmp_path):
    assert outcome_line(write(tmp_path, [0.5], error=KeyboardInterrupt)).startswith("interrupted: ")
    summary = write(tmp_path, [0.5, 0.6])
    summary["status"], summary["run"]["ended"] = "running", None
    assert outcome_line(summary) == "still running, or killed: reward from 0.500 to 0.600, over 2 steps in 3.0 min"


def test_resumed_run_reports_the_time_of_its_steps(tmp_path):
    summary = write(tmp_path, [0.5, 0.6])
    summary["run"] |= {"started": "2026-01-01T00:00:00+00:00", "ended": "2026-02-01T00:00:00+00:00", "resumed_at": [1]}
    assert outcome_line(summary).endswith("over 2 steps in 3.0 min")


def test_commands_name_existing_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/first"
    for name in ("0.jsonl", "9.jsonl", "10.jsonl", "eval_20.jsonl"):
        (run / "rollouts").mkdir(parents=True, exist_ok=True)
        (run / "rollouts" / name).touch()
    (run / "timeline.json.gz").touch()
    (run / "saved/iter_0000001").mkdir(parents=True)
    (run / "saved/iter_0000002").mkdir()
    places = {
        "rollout_dumps": run / "rollouts/{rollout_id}.jsonl",
        "hf_checkpoint": "/models/tiny",
        "tensorboard": run / "tensorboard",
        "checkpoints": run / "saved",
    }
    summary = write(run, [0.5], **places)
    commands = dict(entry.split(maxsplit=1) for entry in next_commands(summary))
    assert commands == {
        "report": "python -m slimrl.observability.report runs/first",
        "charts": "tensorboard --logdir runs/first/tensorboard",
        "rollouts": "python tools/show_rollouts.py runs/first/rollouts/10.jsonl --tokenizer /models/tiny",
        "timeline": "open runs/first/timeline.json.gz at https://ui.perfetto.dev",
        "export": "python tools/convert_torch_dist_to_hf.py --input-dir runs/first/saved/iter_0000002"
        " --output-dir runs/first/hf --origin-hf-dir /models/tiny",
    }
    served = dict(entry.split(maxsplit=1) for entry in next_commands(summary, run / "hf"))
    assert "export" not in served
    assert served["serve"].endswith(" --model-path runs/first/hf --port 30000")
    (run / "adapters").mkdir()
    (run / "adapters/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/models/tiny"}))
    served = dict(entry.split(maxsplit=1) for entry in next_commands(summary, run / "adapters"))
    served_adapters = "--enable-lora --lora-paths policy=runs/first/adapters"
    assert served["serve"].endswith(f" --model-path /models/tiny {served_adapters} --port 30000")
    for command in commands.values():
        script = [word for word in shlex.split(command) if word.startswith("tools/")]
        assert all((ROOT / word).is_file() for word in script)


def test_newest_dump_is_found_by_number_anywhere_in_the_template(tmp_path):
    for number in (2, 11):
        (tmp_path / f"r{number}").mkdir()
        (tmp_path / f"r{number}/{number}.jsonl").touch()
    (tmp_path / "r11/99.jsonl").touch()
    assert newest_dump(f"{tmp_path}/r{{rollout_id}}/{{rollout_id}}.jsonl") == tmp_path / "r11/11.jsonl"
    assert newest_dump(f"{tmp_path}/none/{{rollout_id}}.jsonl") is None
    assert newest_dump(None) is None


def test_last_lines_are_from_the_current_run_in_the_folder(tmp_path):
    assert final_message(tmp_path, 1) == (
        f"ended before its first step; the reason is above, logs of all processes are in {tmp_path}/logs"
    )
    write(tmp_path, [0.5])
    assert final_message(tmp_path, os.getpid()).startswith("completed: reward 0.500, over 1 step in ")
    assert final_message(tmp_path, os.getpid() + 1).startswith("ended before its first step")
