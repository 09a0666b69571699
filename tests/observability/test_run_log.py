"""A run's summary, scalars and log lines: content, atomicity, resume, and what happens to an earlier run."""

import dataclasses
import json
import logging
import math

import pytest

from slimrl.arguments import Arguments
from slimrl.observability.metrics.writers import TensorBoard
from slimrl.observability.run_log import RunLog, StepRecord, evaluation_words, step_line
from slimrl.observability.summary import load_summary


@dataclasses.dataclass
class Result:
    mean_reward: float

    def metrics(self) -> dict[str, float]:
        return {"eval/addition": self.mean_reward, "eval/addition-truncated_ratio": 0.0}


def open_log(run_dir, *, use_tensorboard: bool = False, **options) -> RunLog:
    if use_tensorboard:
        one = options.get("count_train_steps", False) or options.get("steps_per_rollout", 1) == 1
        options["charts"] = [TensorBoard(run_dir / "tensorboard", axes_are_one=one)]
    return RunLog(run_dir, **{"versions": {"slimrl": "0.1.0"}, **options})


def record(step: int, **changes) -> StepRecord:
    defaults = {
        "step": step,
        "weight_version": str(step),
        "rollout": {"rollout/raw_reward": 0.5 + step / 100, "rollout/response_len/mean": 7.0},
        "train": [
            {
                "loss": -0.25,
                "grad_norm": 0.4123,
                "kl_loss": 0.0003,
                "train_rollout_logprob_abs_diff_mean": 4e-7,
                "train_rollout_logprob_abs_diff_max": 3e-6,
                "tokens": 200.0,
            }
        ],
        "seconds": {"generate": 1.24, "train": 0.4, "update_weights": 0.1, "total": 1.8},
    }
    return StepRecord(**{**defaults, **changes})


def write_run(run_dir, steps, **options) -> dict:
    with open_log(run_dir, **options) as log:
        log.evaluation("before", steps[0], {"addition": Result(0.4)})
        for step in steps:
            log.step(record(step))
        log.evaluation("after", steps[-1] + 1, {"addition": Result(0.9)})
    return load_summary(run_dir)


def steps_of(summary: dict) -> list[int]:
    return [step["step"] for step in summary["steps"]]


def test_summary_matches_the_schema(tmp_path):
    summary = write_run(tmp_path / "first", [0, 1], paths={"checkpoints": "/somewhere"})
    assert summary["schema_version"] == 1
    assert (summary["status"], summary["error"]) == ("completed", None)
    assert summary["run"]["name"] == "first"
    assert summary["versions"] == {"slimrl": "0.1.0"}
    assert summary["paths"] == {
        "run": str(tmp_path / "first"),
        "logs": str(tmp_path / "first" / "logs"),
        "checkpoints": "/somewhere",
    }
    assert summary["eval"] == {
        "before": 0.4,
        "after": 0.9,
        "datasets": {"addition": {"before": 0.4, "after": 0.9}},
        "history": [
            {
                "step": 0,
                "when": "before",
                "scores": {"addition": 0.4},
                "metrics": {"eval/addition": 0.4, "eval/addition-truncated_ratio": 0.0},
            },
            {
                "step": 2,
                "when": "after",
                "scores": {"addition": 0.9},
                "metrics": {"eval/addition": 0.9, "eval/addition-truncated_ratio": 0.0},
            },
        ],
    }
    assert summary["steps"][1] == {
        "step": 1,
        "reward": 0.51,
        "train_rollout_logprob_abs_diff_mean": 4e-7,
        "train_rollout_logprob_abs_diff_max": 3e-6,
        "weight_version": "1",
        "seconds": {"generate": 1.24, "train": 0.4, "update_weights": 0.1, "total": 1.8},
        "rollout/response_len/mean": 7.0,
        "loss": -0.25,
        "grad_norm": 0.4123,
        "kl_loss": 0.0003,
        "tokens": 200.0,
        "optimizer_steps": 1,
        "perf/step_time": 1.8,
        "perf/train_tokens_per_second": 500.0,
        "perf/train_wait_time": pytest.approx(1.4),
        "perf/wait_time_ratio": pytest.approx(1.4 / 1.8),
    }


def test_evaluation_line_has_the_largest_pass_rate_and_length():
    metrics = {
        "eval/aime-pass@1": 0.25,
        "eval/aime-pass@2": 0.4,
        "eval/aime-pass@16": 0.625,
        "eval/aime/response_len/mean": 812.34,
        "eval/aime-truncated_ratio": 0.05,
        "eval/aime-2-pass@32": 1.0,  # another dataset
    }
    assert evaluation_words("aime", 0.25, metrics) == "aime 0.25 (pass@16 0.625, 812.3 tokens, 5% truncated)"
    assert evaluation_words("other", 0.5, {}) == "other 0.5"


def test_one_step_is_one_line_of_the_file(tmp_path):
    write_run(tmp_path, list(range(5)))
    lines = (tmp_path / "summary.json").read_text().splitlines()
    assert sum(line.startswith('    {"step": ') for line in lines) == 5


def test_file_is_complete_after_every_report_without_leftovers(tmp_path):
    with open_log(tmp_path) as log:
        for step in range(3):
            log.step(record(step))
            summary = json.loads((tmp_path / "summary.json").read_text())
            assert steps_of(summary) == list(range(step + 1))
            assert summary["status"] == "running"
            assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_log_line_has_the_main_numbers(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "slimrl"):
        logging.getLogger("slimrl").propagate = True
        write_run(tmp_path, [12])
    assert [entry.message for entry in caplog.records] == [
        "evaluation after 12 steps | addition 0.4 (0% truncated)",
        "step 12 | reward 0.62 | loss -0.25 | grad 0.412 | kl 0.0003 | logprob diff 4e-07"
        " | generate 1.2s train 0.4s update 0.1s total 1.8s | version 12",
        "evaluation after 13 steps | addition 0.9 (0% truncated)",
    ]


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"rollout/zero_std/ratio": 1.0}, "NO SPREAD in any group | "),
        ({"rollout/zero_std/ratio": 0.75, "rollout/failed_samples": 0.0}, ""),
        ({"rollout/failed_samples": 3.0}, "3 FAILED | "),
        (
            {"rollout/staleness/mean": 1.24, "rollout/staleness/max": 2.0, "rollout/staleness/dropped": 0.0},
            "age 1.2, at most 2 | ",
        ),
        (
            {"rollout/staleness/mean": 1.0, "rollout/staleness/max": 1.0, "rollout/staleness/dropped": 4.0},
            "age 1, at most 1 | 4 too old | ",
        ),
        ({"rollout/staleness/mean": 1.0, "rollout/staleness/max": 1.0}, ""),  # known, but unbounded
    ],
)
def test_log_line_has_sample_problems_and_staleness(rollout, words):
    entry = record(3, rollout={"rollout/raw_reward": 0.5, **rollout}, train=[])
    line = step_line(entry, {}, entry.seconds, compares_groups=True)
    assert line == f"step 3 | reward 0.5 | {words}generate 1.2s train 0.4s update 0.1s total 1.8s | version 3"


@pytest.mark.parametrize(
    ("flags", "warned"),
    [({"n_samples_per_prompt": 4}, True), ({}, False), ({"n_samples_per_prompt": 4, "loss_type": "sft_loss"}, False)],
)
def test_groups_without_spread_are_reported_for_group_estimators(tmp_path, caplog, flags, warned):
    args = Arguments(run_dir=str(tmp_path), hf_checkpoint="model", **flags)
    with caplog.at_level(logging.INFO, "slimrl"), RunLog.open(args, {}) as log:
        logging.getLogger("slimrl").propagate = True
        log.step(record(0, rollout={"rollout/raw_reward": 0.0, "rollout/zero_std/ratio": 1.0}))
    assert ("NO SPREAD in any group" in caplog.records[-1].message) is warned


def test_absent_phases_count_zero_and_unknown_ones_are_kept(tmp_path):
    with open_log(tmp_path) as log:
        log.step(record(0, seconds={"train": 1.0, "total": 2.0, "save": 0.5}))
    assert load_summary(tmp_path)["steps"][0]["seconds"] == {
        "generate": 0.0,
        "train": 1.0,
        "update_weights": 0.0,
        "total": 2.0,
        "save": 0.5,
    }


def test_several_optimizer_steps_are_combined_and_kept(tmp_path):
    train = [{"loss": 1.0, "lr": 1e-6}, {"loss": 3.0, "lr": 2e-6}]
    with open_log(tmp_path) as log:
        log.step(record(0, train=train))
    step = load_summary(tmp_path)["steps"][0]
    assert (step["loss"], step["lr"], step["optimizer_steps"]) == (2.0, 2e-6, 2)
    assert step["by_optimizer_step"] == train


def test_non_finite_numbers_become_null(tmp_path):
    with open_log(tmp_path) as log:
        log.step(record(0, train=[{"loss": math.nan, "grad_norm": math.inf}]))
        log.evaluation(1, 1, {"addition": Result(math.nan)})
    step = load_summary(tmp_path)["steps"][0]
    assert step["loss"] is None
    assert step["grad_norm"] is None
    assert step["train_rollout_logprob_abs_diff_mean"] is None


def test_several_datasets_are_averaged_and_kept_apart(tmp_path):
    with open_log(tmp_path) as log:
        log.evaluation("before", 0, {"easy": Result(0.8), "hard": Result(0.2)})
    evaluation = load_summary(tmp_path)["eval"]
    assert evaluation["before"] == pytest.approx(0.5)
    assert evaluation["after"] is None
    assert evaluation["datasets"]["hard"] == {"before": 0.2, "after": None}


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), "interrupted", None),
        (RuntimeError("server 1 died"), "failed", "RuntimeError: server 1 died"),
    ],
)
def test_end_state_of_a_run_is_recorded(tmp_path, error, status, message):
    with pytest.raises(type(error)), open_log(tmp_path) as log:
        log.step(record(0))
        raise error
    summary = load_summary(tmp_path)
    assert (summary["status"], summary["error"]) == (status, message)
    assert summary["run"]["ended"] >= summary["run"]["started"]


class Chart:
    """A writer that records its end, and fails then if told to."""

    def __init__(self, error=None):
        self.error, self.closed = error, []

    def begin(self, starts): ...
    def add(self, axis, number, values): ...
    def close(self, *, failed):
        self.closed.append(failed)
        if self.error is not None:
            raise self.error


def test_failing_writer_does_not_prevent_closing_the_others(tmp_path):
    charts = [Chart(OSError("disk full")), Chart(), Chart(OSError("gone"))]
    with pytest.raises(OSError, match="disk full|gone"), open_log(tmp_path, charts=charts) as log:
        log.step(record(0))
    assert [chart.closed for chart in charts] == [[False]] * 3
    assert load_summary(tmp_path)["status"] == "completed"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("server 1 died")])
def test_failing_writer_does_not_hide_why_the_run_ended(tmp_path, error, caplog):
    logging.getLogger("slimrl").propagate = True
    chart = Chart(OSError("disk full"))
    with pytest.raises(type(error)), open_log(tmp_path, charts=[chart]) as log:
        log.step(record(0))
        raise error
    assert (
        chart.closed == [True]
        and "could not be reported to all metric writers" in caplog.text
        and "disk full" in caplog.text
    )


def test_resumed_run_keeps_earlier_steps_and_repeats_later_ones(tmp_path):
    first = write_run(tmp_path, [0, 1, 2])
    with open_log(tmp_path) as log:
        log.evaluation("before", 2, {"addition": Result(0.6)})
        log.step(record(2, weight_version="again"))
        log.step(record(3))
        log.evaluation("after", 4, {"addition": Result(0.95)})
    summary = load_summary(tmp_path)
    assert steps_of(summary) == [0, 1, 2, 3]
    assert summary["steps"][:2] == first["steps"][:2]
    assert summary["steps"][2]["weight_version"] == "again"
    assert summary["run"]["resumed_at"] == [2]
    assert summary["run"]["started"] == first["run"]["started"]
    assert (summary["eval"]["before"], summary["eval"]["after"]) == (0.4, 0.95)
    assert [(entry["step"], entry["when"]) for entry in summary["eval"]["history"]] == [
        (0, "before"),
        (2, "between"),
        (4, "after"),
    ]
    # step 2 was dropped, so the summary that had it is kept next to it
    assert steps_of(load_summary(tmp_path / "summary.1.json")) == [0, 1, 2]


def test_finished_run_can_be_extended(tmp_path):
    write_run(tmp_path, [0, 1])
    summary = write_run(tmp_path, [2, 3])
    assert steps_of(summary) == [0, 1, 2, 3]
    assert [(entry["step"], entry["when"]) for entry in summary["eval"]["history"]] == [
        (0, "before"),
        (2, "between"),
        (4, "after"),
    ]
    assert summary["eval"]["history"][1]["scores"] == {"addition": 0.4}, "evaluated again when it continued"
    assert not (tmp_path / "summary.1.json").exists(), "nothing was dropped"


def test_new_run_in_the_same_folder_keeps_old_summaries(tmp_path):
    for _ in range(3):
        write_run(tmp_path, [0, 1])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["summary.1.json", "summary.2.json", "summary.json"]


def test_broken_summary_is_renamed_not_lost(tmp_path):
    (tmp_path / "summary.json").write_text('{"schema_version": 1, "st')
    assert steps_of(write_run(tmp_path, [5])) == [5]
    assert (tmp_path / "summary.1.json").read_text() == '{"schema_version": 1, "st'


def test_run_that_fails_to_start_keeps_the_earlier_summary(tmp_path):
    before = write_run(tmp_path, [0, 1])
    with pytest.raises(RuntimeError), open_log(tmp_path):
        raise RuntimeError("no server came up")
    assert load_summary(tmp_path) == before


def test_first_run_that_fails_to_start_is_recorded(tmp_path):
    with pytest.raises(RuntimeError), open_log(tmp_path):
        raise RuntimeError("no server came up")
    assert load_summary(tmp_path)["error"] == "RuntimeError: no server came up"


def test_step_without_a_reward_raises(tmp_path):
    with pytest.raises(KeyError, match="rollout/raw_reward"), open_log(tmp_path) as log:
        log.step(record(0, rollout={}))


def test_tensorboard_gets_every_scalar_at_its_step(tmp_path):
    write_run(tmp_path, [0, 1], use_tensorboard=True)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    values = {
        name: [(point.step, pytest.approx(point.value)) for point in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
    assert values["rollout/raw_reward"] == [(0, 0.5), (1, 0.51)]
    assert values["train/loss"] == [(0, -0.25), (1, -0.25)]
    assert values["eval/addition"] == [(0, 0.4), (2, 0.9)]
    assert values["perf/generate_time"] == [(0, 1.24), (1, 1.24)]
    assert values["perf/train_tokens_per_second"] == [(0, 500.0), (1, 500.0)]


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(point.step, point.value) for point in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.mark.parametrize("options", [{}, {"steps_per_rollout": 2}, {"steps_per_rollout": 2, "count_train_steps": True}])
def test_tensorboard_hides_points_repeated_by_a_resumed_run(tmp_path, options):
    """Also with several optimizer steps per rollout, when train/ is ahead of the other axes."""
    per_rollout = options.get("steps_per_rollout", 1)
    for first, loss in ((0, 1.0), (1, 2.0)):
        with open_log(tmp_path, use_tensorboard=True, **options) as log:
            for step in range(first, 3):
                log.step(record(step, train=[{"loss": loss}] * per_rollout))
            log.evaluation("after", 3, {"addition": Result(loss / 4)})
    found = scalars(tmp_path / "tensorboard")
    of_train = found if len(options) != 1 else scalars(tmp_path / "tensorboard" / "train_steps")
    losses = [1.0] * per_rollout + [2.0] * 2 * per_rollout
    assert of_train["train/loss"] == list(enumerate(losses))
    unit = per_rollout if options.get("count_train_steps") else 1
    assert [step for step, _ in found["rollout/raw_reward"]] == [0, unit, 2 * unit]
    assert found["eval/addition"] == [(3 * unit, 0.5)]


def test_optimizer_steps_continue_in_a_new_summary(tmp_path):
    with open_log(tmp_path, use_tensorboard=True, steps_per_rollout=4, count_train_steps=True) as log:
        log.begin(10)
        log.step(record(10, train=[{"loss": 1.0}] * 4))
    found = scalars(tmp_path / "tensorboard")
    assert [step for step, _ in found["train/loss"]] == [40, 41, 42, 43]
    assert found["rollout/raw_reward"][0][0] == 40


def test_rank_metrics_of_the_rollout_are_stored_with_the_steps(tmp_path):
    train = [{"loss": 1.0, "rollout/advantages": 0.25, "perf/actor_train_time": 2.0}, {"loss": 3.0}]
    with open_log(tmp_path, use_tensorboard=True, steps_per_rollout=2) as log:
        log.step(record(0, train=train))
    (step,) = load_summary(tmp_path)["steps"]
    assert (step["loss"], step["rollout/advantages"], step["perf/actor_train_time"]) == (2.0, 0.25, 2.0)
    assert step["by_optimizer_step"] == [{"loss": 1.0}, {"loss": 3.0}]
    assert scalars(tmp_path / "tensorboard")["rollout/advantages"] == [(0, 0.25)]


def test_run_flags_include_the_output_paths(tmp_path):
    args = Arguments()
    args.run_dir = str(tmp_path / "named")
    args.hf_checkpoint, args.save, args.load = "/models/tiny", "/checkpoints", None
    with RunLog.open(args, {}) as log:
        log.step(record(0))
    summary = load_summary(tmp_path / "named")
    assert summary["run"]["name"] == "named"
    assert summary["paths"]["hf_checkpoint"] == "/models/tiny"
    assert summary["paths"]["checkpoints"] == "/checkpoints"
    assert "load" not in summary["paths"]


def test_step_before_a_save_is_written_early_and_reported_once_with_final_times(tmp_path, caplog):
    caplog.set_level("INFO", logger="slimrl")
    with open_log(tmp_path) as log:
        log.step(record(0))
        log.expect(record(1, seconds={"generate": 1.0, "total": 1.5}))
        assert steps_of(load_summary(tmp_path)) == [0, 1]  # available to a run that resumes from that checkpoint
        assert "step 1 |" not in caplog.text
        log.step(record(1, seconds={"generate": 1.0, "save": 2.0, "update_weights": 0.5, "total": 2.0}))
    steps = load_summary(tmp_path)["steps"]
    assert [step["step"] for step in steps] == [0, 1]
    assert steps[1]["seconds"] == {"generate": 1.0, "train": 0.0, "update_weights": 0.5, "total": 2.0, "save": 2.0}
    assert caplog.text.count("step 1 |") == 1


def test_time_after_a_step_is_added_to_it(tmp_path):
    with open_log(tmp_path) as log:
        log.step(record(0))
        log.step(record(1))
        log.phase(1, "save", 2.5)
        with pytest.raises(KeyError, match="step 0 is not the last"):
            log.phase(0, "save", 1.0)
    steps = load_summary(tmp_path)["steps"]
    assert [step["seconds"].get("save") for step in steps] == [None, 2.5]
