"""W&B: content and name of an offline run, and that W&B can neither delay nor end training."""

import dataclasses
import logging
import math
import subprocess
import sys
import threading
import time
import types

import pytest

from slimrl.arguments import Arguments
from slimrl.observability.metrics import writers
from slimrl.observability.metrics.writers import WandbRun, WandbSettings
from slimrl.observability.run_log import RunLog
from slimrl.observability.summary import load_summary
from tests.observability.test_run_log import Result, record
from tests.observability.wandb_file import axes_of, rows, run_of

KEY = "0123456789abcdef0123456789abcdef01234567"


def arguments(folder, **changes) -> Arguments:
    args = Arguments(use_wandb=True, wandb_mode="offline", wandb_key=KEY, run_dir=str(folder), lr=1e-6)
    return dataclasses.replace(args, **changes)


def train(args: Arguments, first: int, last: int) -> dict:
    with RunLog.open(args, {}) as log:
        log.begin(first)
        log.evaluation("before", first, {"addition": Result(0.4)})
        for step in range(first, last):
            log.step(record(step, train=[{"loss": step + 0.5, "grad_norm": math.nan}, {"loss": -step}]))
    return load_summary(args.run_dir)


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """Two rollouts of two optimizer steps, and a third by a resumed run: the summary, and both W&B files."""
    import wandb

    folder = tmp_path_factory.mktemp("run")
    args = arguments(folder, num_steps_per_rollout=2, wandb_project="arithmetic", wandb_group="sums", wandb_team="us")
    train(args, 0, 2)
    (first,) = folder.glob("wandb/offline-run-*")
    while time.strftime("%Y%m%d_%H%M%S") in first.name:  # two runs of one second would have one folder
        time.sleep(0.1)
    summary = train(args, 2, 3)
    wandb.teardown()  # like at the end of a process: waits until W&B's service has written everything
    return summary, sorted(folder.glob("wandb/offline-run-*/*.wandb")), folder


def test_offline_run_has_the_numbers_of_the_summary(offline):
    summary, files, _ = offline
    found = [row for file in files for row in rows(file)]
    of_rollouts = [row for row in found if "rollout/step" in row]
    assert [row["rollout/step"] for row in of_rollouts] == [0, 1, 2]
    for step, row in zip(summary["steps"], of_rollouts, strict=True):
        assert row["rollout/raw_reward"] == step["reward"]
        assert row["rollout/response_len/mean"] == step["rollout/response_len/mean"]
        assert row["perf/generate_time"] == step["seconds"]["generate"]
        assert row["perf/wait_time_ratio"] == step["perf/wait_time_ratio"]
    of_steps = [row for row in found if "train/step" in row]
    assert [(row["train/step"], row["train/loss"]) for row in of_steps] == [
        (0, 0.5),
        (1, 0),
        (2, 1.5),
        (3, -1),
        (4, 2.5),
        (5, -2),
    ]
    assert math.isnan(of_steps[0]["train/grad_norm"]) and summary["steps"][0]["grad_norm"] is None
    of_evaluations = [(row["eval/step"], row["eval/addition"]) for row in found if "eval/step" in row]
    assert of_evaluations == [(0, 0.4), (2, 0.4)]


def test_each_metric_has_its_axis(offline):
    _, (file, _), _ = offline
    assert axes_of(file) == {
        "train/*": "train/step",
        "eval/*": "eval/step",
        **{f"{prefix}/*": "rollout/step" for prefix in ("rollout", "perf", "memory", "multi_turn", "passrate")},
    }


def test_resumed_run_continues_the_same_wandb_run(offline):
    summary, files, _ = offline
    runs = [run_of(file) for file in files]
    assert len(files) == 2
    assert {run.run_id for run in runs} == {summary["run"]["wandb_id"]}
    group = f"sums_{summary['run']['wandb_id']}"
    for run in runs:
        assert (run.project, run.entity, run.run_group, run.display_name) == ("arithmetic", "us", group, group)


def test_flags_are_the_config_and_no_key_is_in_any_file(offline):
    _, (file, _), folder = offline
    config = {item.key: item.value_json for item in run_of(file).config.update}
    assert float(config["lr"]) == 1e-6
    assert not {"wandb_key", "train_env_vars"} & config.keys()
    for path in folder.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"wandb_run_id": "chosen"}, ("chosen", None, "run")),
        ({"wandb_group": "g"}, ("earlier", "g_earlier", "g_earlier")),
        ({"wandb_group": "g", "wandb_random_suffix": False}, ("earlier", "g", "g")),
    ],
)
def test_run_name_comes_from_the_flags(tmp_path, changes, expected):
    settings = WandbSettings.from_args(arguments(tmp_path / "run", **changes), "earlier")
    assert (settings.id, settings.group, settings.name) == expected
    assert KEY not in repr(settings)


def test_keys_of_other_services_are_not_in_the_config(tmp_path):
    args = arguments(
        tmp_path,
        train_env_vars={"TOKEN": "t0p"},
        rm_url="http://us:t0p@judge:80/score",
        sglang_options={"api_key": "t0p", "ssl_keyfile_password": "t0p", "tp_size": 2},
        router_options={"oracle_password": "t0p", "control_plane_api_keys": [["id", "t0p"]]},
    )
    settings = WandbSettings.from_args(args, None)
    assert settings.config["sglang_options"] == {"tp_size": 2}
    assert settings.config["rm_url"] == "http://***@judge:80/score"
    assert "t0p" not in str(settings.config)


def test_disabled_mode_creates_no_run(tmp_path):
    assert WandbSettings.from_args(arguments(tmp_path, wandb_mode="disabled"), None) is None
    assert WandbSettings.from_args(arguments(tmp_path, use_wandb=False), None) is None


class Broken:
    """A W&B run that fails at the second row."""

    id, offline, dir = "x", True, "/nowhere/files"

    def __init__(self):
        self.rows = []

    def log(self, row):
        if self.rows:
            raise ConnectionError("the service is gone")
        self.rows.append(row)


def test_failure_is_logged_once_and_the_run_continues(tmp_path, monkeypatch, caplog):
    broken = Broken()
    monkeypatch.setattr(writers, "_open", lambda settings: broken)
    caplog.set_level(logging.INFO, "slimrl")
    logging.getLogger("slimrl").propagate = True
    summary = train(arguments(tmp_path), 0, 5)
    assert summary["status"] == "completed" and len(summary["steps"]) == 5
    assert broken.rows == [{"eval/addition": 0.4, "eval/addition-truncated_ratio": 0.0, "eval/step": 0}]
    said = [
        entry.getMessage()
        for entry in caplog.records
        if "W&B logging stopped, training continues" in entry.getMessage()
    ]
    assert len(said) == 1 and "ConnectionError: the service is gone" in said[0]


@pytest.mark.parametrize("error", [TimeoutError("Timed out finishing run."), SystemExit(1)])
def test_any_failure_to_finish_is_logged(tmp_path, monkeypatch, caplog, error):
    def fail(exit_code):
        raise error

    run = types.SimpleNamespace(id="x", offline=True, dir="/nowhere/files", log=lambda row: None, finish=fail)
    monkeypatch.setattr(writers, "_open", lambda settings: run)
    logging.getLogger("slimrl").propagate = True
    assert train(arguments(tmp_path), 0, 1)["status"] == "completed"
    assert caplog.text.count("W&B logging stopped") == 1 and type(error).__name__ in caplog.text


def test_package_raises_on_timeout(tmp_path, monkeypatch):
    import wandb

    given = {}
    run = types.SimpleNamespace(define_metric=lambda *_, **__: None)
    monkeypatch.setattr(wandb, "init", lambda **options: given.update(options) or run)
    writers._open(WandbSettings.from_args(arguments(tmp_path), None))
    assert (given["settings"].finish_timeout, given["settings"].finish_timeout_raises) == (30.0, True)


def test_unresponsive_service_delays_neither_steps_nor_shutdown(tmp_path, monkeypatch, caplog):
    forever = threading.Event()
    monkeypatch.setattr(writers, "_open", lambda settings: forever.wait(30))
    monkeypatch.setattr(writers, "LATE_START_S", 0.1)
    logging.getLogger("slimrl").propagate = True
    assert train(arguments(tmp_path), 0, 5)["status"] == "completed"
    assert caplog.text.count("it did not finish in time") == 1
    forever.set()


def test_package_is_not_imported_without_the_flag(tmp_path):
    code = "import sys, slimrl.observability.run_log; print('wandb' in sys.modules, 'prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]


def test_run_that_never_started_can_be_closed(tmp_path):
    WandbRun(WandbSettings.from_args(arguments(tmp_path), None)).close(failed=True)
