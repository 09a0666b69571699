"""Training ranks are killed: new ones take over, and the run ends bit for bit as one without a loss."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil
import pytest

from tests.end_to_end import checkpoints, harness
from tests.end_to_end.conftest import Tiny
from tests.end_to_end.harness import Finished, Started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 11
RANK = "slimrl.cluster.training.train_process"


def start(tiny: Tiny, folder: Path, name: str, entry: str = "train.py", **flags: object) -> Started:
    saved = {"save": folder / name, "load": folder / name, "save_interval": 3, "use_fault_tolerance": True}
    given = {"num_rollout": STEPS, "actor_num_gpus_per_node": 2, "colocate": True} | saved | flags
    return harness.start(entry, tiny.flags(**given), folder, name, tiny.home)


def kill_rank(started: Started, number: int) -> None:
    """Kills the process of one rank; the newest processes are those of a recovery."""
    subreapers = [one for one in started.processes(RANK) if "subreaper.py" in " ".join(one.cmdline())]
    ranks = [child for one in subreapers for child in one.children()]
    sorted(ranks, key=psutil.Process.create_time)[number].kill()


def undisturbed(tiny: Tiny, folder: Path, entry: str = "train.py", **flags: object) -> Finished:
    done = start(tiny, folder, "undisturbed", entry, **flags).finish(300)
    assert done.code == 0, done.output
    return done


def assert_equal_ends(folder: Path, done: Finished, calm: Finished) -> None:
    """Both runs have the same metrics of every step and the same last checkpoint, bit for bit."""
    last = f"iter_{STEPS - 1:07d}"
    one, other = (checkpoints.read(folder / name / last) for name in ("undisturbed", "killed"))
    assert checkpoints.differences(one, other) == []
    for name in ("reward", "weight_version", "loss", "grad_norm"):
        assert done.steps(name) == calm.steps(name), name


def test_run_with_killed_ranks_ends_as_one_without(tiny, tmp_path):
    calm = undisturbed(tiny, tmp_path)
    started = start(tiny, tmp_path, "killed")
    started.wait_for_line("step 0 |", 200)  # before the first checkpoint
    kill_rank(started, 1)
    started.wait_for_line("step 4 |", 200)  # two rollouts after the checkpoint of the third
    kill_rank(started, 0)
    done = started.finish(300)
    assert done.code == 0, done.output
    assert done.left == []
    assert done.output.count("new training processes continue from the checkpoint") == 2
    assert sum(done.steps("rollout/faults/ranks_lost")) == 2
    assert "died with exit code -9" in done.output
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-4
    assert_equal_ends(tmp_path, done, calm)
    assert len(list((done.run_dir / "logs").glob("sglang*.log"))) == 2  # the servers are the first ones


def test_generation_goes_on_while_ranks_are_replaced(tiny, tmp_path):
    """One-step off-policy with a broadcast of the weights, and checkpoints that are written in the background."""
    split = {"colocate": None, "rollout_num_gpus": 1, "actor_num_gpus_per_node": 1, "async_save": True}
    calm = undisturbed(tiny, tmp_path, "train_async.py", **split)
    started = start(tiny, tmp_path, "killed", "train_async.py", **split)
    started.wait_for_line("step 4 |", 200)
    kill_rank(started, 0)
    done = started.finish(300)
    assert done.code == 0, done.output
    assert done.left == []
    assert sum(done.steps("rollout/faults/ranks_lost")) == 1
    assert_equal_ends(tmp_path, done, calm)


def test_rank_that_is_lost_again_and_again_ends_the_run_by_name(tiny, tmp_path):
    started = start(tiny, tmp_path, "lost")
    started.wait_for_line("step 0 |", 200)
    deadline = time.monotonic() + 200
    while started.process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            kill_rank(started, 0)
        time.sleep(0.5)
    done = started.finish(60)
    assert done.code == 75, done.output
    assert "ranks were lost 4 times in one rollout" in done.summary["error"]
    assert done.left == []
