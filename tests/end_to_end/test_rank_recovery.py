"""Training ranks are killed: new ones take over, and the run ends bit for bit as one without a loss."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray._private.node import Node
from ray.cluster_utils import Cluster

from tests.end_to_end import checkpoints, harness
from tests.end_to_end.conftest import Tiny
from tests.end_to_end.harness import Finished, Started
from tests.end_to_end.test_over_nodes import NODE, token

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 11
RANK = "slimrl.cluster.training.train_process"
SPLIT = {"actor_num_gpus_per_node": 1, "rollout_num_gpus": 1, "num_gpus_per_node": 1}


@pytest.fixture
def nodes() -> Iterator[tuple[Cluster, Node]]:
    """Two Ray nodes with a GPU each; the second one, which is not the head, has the run's first GPU, for training."""
    with (
        tempfile.TemporaryDirectory(prefix="slimrl-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", folder)  # where Cluster writes its address, without creating the folder
        (Path(folder) / "ray").mkdir()
        cluster = Cluster()
        try:
            head = cluster.add_node(**NODE, temp_dir=folder)
            while (other := cluster.add_node(**NODE, temp_dir=folder)).node_id > head.node_id:
                cluster.remove_node(other)  # GPUs of one address are ordered by their nodes' ids
            yield cluster, other
        finally:
            cluster.shutdown()


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
    assert_equal_checkpoints(folder)
    for name in ("reward", "weight_version", "loss", "grad_norm"):
        assert done.steps(name) == calm.steps(name), name


def assert_equal_checkpoints(folder: Path, critic: str = "") -> None:
    """The last checkpoints are equal but for the random name by which a critic's belongs to its policy's."""
    last = f"{critic}iter_{STEPS - 1:07d}"
    one, other = (checkpoints.read(folder / name / last) for name in ("undisturbed", "killed"))
    different = checkpoints.differences(one, other)
    assert [where for where in different if "/saved_with" not in where] == []


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


@pytest.mark.parametrize("place", ["in the policy's ranks", "on a GPU of its own"])
def test_critic_continues_from_its_checkpoint_after_a_loss(tiny, tmp_path, place: str):
    ppo = {"advantage_estimator": "ppo", "critic_lr": 1e-3, "normalize_values": True, "use_kl_loss": None}
    ppo |= {"kl_loss_coef": None, "colocate": None, "rollout_num_gpus": 1}
    if place == "on a GPU of its own":
        ppo |= {"actor_num_gpus_per_node": 1, "critic_num_gpus_per_node": 1}
    calm = undisturbed(tiny, tmp_path, **ppo)
    started = start(tiny, tmp_path, "killed", **ppo)
    started.wait_for_line("step 4 |", 200)
    kill_rank(started, 1)  # the critic's, where it has its own
    done = started.finish(300)
    assert done.code == 0, done.output
    assert done.left == []
    assert sum(done.steps("rollout/faults/ranks_lost")) == 1
    assert done.steps("critic-value_loss") == calm.steps("critic-value_loss")
    assert_equal_ends(tmp_path, done, calm)
    assert_equal_checkpoints(tmp_path, "critic/")


def start_on(cluster: Cluster, tiny: Tiny, folder: Path, name: str, **flags: object) -> Started:
    saved = {"save": folder / name, "load": folder / name, "save_interval": 3, "use_fault_tolerance": True}
    words = tiny.flags(runs_dir=folder / "runs", run_name=name, **SPLIT | saved | flags)
    return harness.launch(
        [sys.executable, str(harness.ROOT / "train.py"), *words],
        log=folder / f"{name}.out",
        run_dir=folder / "runs" / name,
        cwd=folder,
        path="/usr/local/bin:/usr/bin:/bin",
        home=tiny.home,
        more={"RAY_ADDRESS": cluster.address, **token()},
    )


def test_training_continues_on_a_spare_node_after_the_loss_of_its_node(nodes, tiny, tmp_path):
    cluster, of_training = nodes
    calm = undisturbed(tiny, tmp_path, colocate=None, **SPLIT)
    started = start_on(cluster, tiny, tmp_path, "killed", num_rollout=STEPS)
    started.wait_for_line("step 3 |", 200)
    cluster.add_node(**NODE, temp_dir=cluster.head_node.get_temp_dir_path())
    started.wait_for_line("step 4 |", 100)
    cluster.remove_node(of_training, allow_graceful=False)
    done = started.finish(300)
    assert done.code == 0, done.output
    assert "(training ranks 0) is lost: the machine went down, or Ray ended on it" in done.output
    assert "training continues on " in done.output
    assert sum(done.steps("rollout/faults/ranks_lost")) == 1
    assert_equal_ends(tmp_path, done, calm)
    assert len(list((done.run_dir / "logs").glob("sglang*.log"))) == 1  # the server is the first one


def test_lost_node_without_a_spare_ends_the_run_by_name(nodes, tiny, tmp_path):
    cluster, of_training = nodes
    started = start_on(cluster, tiny, tmp_path, "lost", num_rollout=5000)
    started.wait_for_line("step 1 |", 200)
    cluster.remove_node(of_training, allow_graceful=False)
    lost = time.monotonic()
    done = started.finish(120)
    assert done.code == 75 and time.monotonic() - lost < 60, done.output
    assert re.search(r"\(training ranks 0\) is lost: .*; its replacement failed: no other node has 1 free", done.output)


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
