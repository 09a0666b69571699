"""A run that `--ci-test` ends: the failing step is in the summary."""

from __future__ import annotations

import time
import types

import pytest

from slimrl.arguments import Arguments
from slimrl.cluster import run
from slimrl.cluster.rollout_manager_proxy import RolloutManagerProxy
from slimrl.cluster.run import Run
from slimrl.observability.ci_checks import RunCheckError
from slimrl.observability.run_log import RunLog
from slimrl.observability.summary import load_summary
from slimrl.observability.tracer import Timeline

STEP = {"loss": 0.0, "grad_norm": 0.25, "kl_loss": 0.0, "ratio_max_abs_diff": 0.5}


def test_final_step_is_in_the_summary(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "poll_actors", lambda asked: [])
    trainers = types.SimpleNamespace(train=lambda *_: [STEP], progress=None, memory=lambda: [], last_weight_update={})
    actor = types.SimpleNamespace(memory=types.SimpleNamespace(remote=lambda: None))
    rollout = types.SimpleNamespace(
        rollout_id=0,
        batches=[],
        metrics={"rollout/raw_reward": 0.5},
        weight_version="0",
        seconds=1.0,
    )
    args = Arguments(ci_test=True, num_rollout=3, run_dir=str(tmp_path))
    with pytest.raises(RunCheckError, match="ratio_max_abs_diff"), RunLog(tmp_path, versions={}) as log:
        log.begin(0)
        one = Run(args, 0, trainers, RolloutManagerProxy(actor), None, log, Timeline.off())
        with one.step(0):
            time.sleep(0.001)
            one.train(rollout)
    summary = load_summary(tmp_path)
    assert (summary["status"], len(summary["steps"])) == ("failed", 1)
    assert (summary["steps"][0]["ratio_max_abs_diff"], summary["steps"][0]["reward"]) == (0.5, 0.5)
