"""Training ranks are killed: new ones take over, and the run ends bit for bit as one without a loss.

With the distributed optimizer, the default, the new ones load a checkpoint; `WHOLE_STATE` leaves it out.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray._private.node import Node
from ray.cluster_utils import Cluster

from tests.end_to_end import checkpoints, harness, kills
from tests.end_to_end.conftest import Tiny
from tests.end_to_end.harness import Finished, Started
from tests.end_to_end.ray_nodes import COLOCATED, SPLIT, add_spare, launch_on, two_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 11
RANK = "slimrl.cluster.training.train_process"
WHOLE_STATE = {"no_use_distributed_optimizer": True}
FROM_PEERS = "new training processes continue from the state of their data-parallel peers in memory"
FROM_CHECKPOINT = "new training processes continue from the checkpoint"


@pytest.fixture
def nodes() -> Iterator[tuple[Cluster, Node]]:
    """See `two_nodes`."""
    with two_nodes() as made:
        yield made


@contextlib.contextmanager
def paused(started: Started) -> Iterator[None]:
    """The driver stops: while a spare node starts, a fast machine would end the run."""
    driver = psutil.Process(started.process.pid)
    driver.suspend()
    try:
        yield
    finally:
        driver.resume()


def start(tiny: Tiny, folder: Path, name: str, entry: str = "train.py", **flags: object) -> Started:
    saved = {"save": folder / name, "load": folder / name, "save_interval": 3, "use_fault_tolerance": True}
    given = {"num_rollout": STEPS, "actor_num_gpus_per_node": 2, "colocate": True} | saved | flags
    return harness.start(entry, tiny.flags(**given), folder, name, tiny.home)


def kill_rank(started: Started, number: int, kind: str = "train") -> None:
    """Kills the process of one rank."""
    rank_of(started, number, kind).kill()


def rank_of(started: Started, number: int, kind: str = "train") -> psutil.Process:
    """The process of one rank, which writes its log. Raises IndexError if there is none."""
    subreapers = [one for one in started.processes(RANK) if "subreaper.py" in " ".join(one.cmdline())]
    ranks = [child for one in subreapers for child in one.children()]
    return [rank for rank in ranks if os.readlink(f"/proc/{rank.pid}/fd/1").endswith(f"/{kind}-rank{number}.log")][0]


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
    why = "--use-distributed-optimizer gives each data-parallel rank its own part of the optimizer"
    assert done.output.count(f"{FROM_CHECKPOINT} ({why})") == 2
    assert sum(done.steps("rollout/faults/ranks_lost")) == 2
    assert "died with exit code -9" in done.output
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-4
    assert_equal_ends(tmp_path, done, calm)
    assert len(list((done.run_dir / "logs").glob("sglang*.log"))) == 2  # the servers are the first ones


def test_new_ranks_continue_with_the_state_of_their_peers(tiny, tmp_path):
    """Each loss hands over the state of the other rank; no rollout but an interrupted one is trained on again."""
    calm = undisturbed(tiny, tmp_path, **WHOLE_STATE)
    started = start(tiny, tmp_path, "killed", **WHOLE_STATE)
    started.wait_for_line("step 4 |", 200)
    kill_rank(started, 1)
    started.wait_for_line(FROM_PEERS, 200)
    started.wait_for_line("step 6 |", 200)
    lost, since_ns = rank_of(started, 0), time.monotonic_ns()
    timeline = started.run_dir / "timeline/train-rank-0.jsonl"
    assert kills.wait_for_call(started, timeline, since_ns, "train", 0, time.monotonic() + 200)
    lost.kill()  # in a log-probability pass or the first forward pass: the other rank waits for it in a collective
    done = started.finish(300)
    assert done.code == 0, done.output
    assert done.left == []
    assert f"{FROM_PEERS} (rank 0); no training had to be repeated" in done.output
    assert f"{FROM_PEERS} (rank 1); no training had to be repeated" in done.output
    assert sum(done.steps("rollout/faults/ranks_lost")) == 2
    assert_equal_ends(tmp_path, done, calm)


@pytest.mark.parametrize("source", ["peers", "checkpoint"])
def test_rank_that_is_lost_in_a_colocated_weight_update_is_replaced(tiny, tmp_path, source: str):
    """Rank 0 calls the servers; a server is stopped then, and has a part of the weights."""
    flags = WHOLE_STATE if source == "peers" else {}
    calm = undisturbed(tiny, tmp_path, **flags)
    started = start(tiny, tmp_path, "killed", **flags)
    timeline, since_ns = started.run_dir / "timeline/train-rank-0.jsonl", int(started.started * 1e9)
    deadline = time.monotonic() + 300
    lost, within = [], []
    for rank, nth in enumerate((3, 6)):
        started.wait_for_line(f"step {nth - 2} |", 200)
        victim = rank_of(started, rank)
        # every recovery repeats the update that it interrupted
        assert kills.wait_for_call(started, timeline, since_ns, kills.UPDATE, nth + rank, deadline)
        victim.kill()
        now_ns = time.monotonic_ns()
        lost.append(time.monotonic())
        begun = kills.calls(timeline, since_ns)[-1]
        within.append(begun.name == kills.UPDATE and now_ns < (begun.end_ns or now_ns + 1))
        started.wait_for_line(f"step {nth} |", 200)
        assert time.monotonic() - lost[-1] < 60  # it is over, for which an update that hangs takes 300 s
    done = started.finish(300)
    assert done.code == 0, done.output
    assert done.left == []
    assert any(within), "no kill fell into a weight update"
    assert done.output.count("new training processes continue from the ") == 2
    assert (FROM_PEERS if source == "peers" else FROM_CHECKPOINT) in done.output
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-4
    assert_equal_ends(tmp_path, done, calm)
    assert len(list((done.run_dir / "logs").glob("sglang*.log"))) == 2


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
    kill_rank(started, *((0, "critic") if place == "on a GPU of its own" else (1,)))
    done = started.finish(300)
    assert done.code == 0, done.output
    assert done.left == []
    assert sum(done.steps("rollout/faults/ranks_lost")) == 1
    assert done.steps("critic-value_loss") == calm.steps("critic-value_loss")
    assert_equal_ends(tmp_path, done, calm)
    assert_equal_checkpoints(tmp_path, "critic/")


def start_on(cluster: Cluster, tiny: Tiny, folder: Path, name: str, **flags: object) -> Started:
    saved = {"save": folder / name, "load": folder / name, "save_interval": 3, "use_fault_tolerance": True}
    return launch_on(cluster, tiny, folder, name, tiny.flags(**saved | flags))


def test_training_continues_on_a_spare_node_after_the_loss_of_its_node(nodes, tiny, tmp_path):
    cluster, of_training = nodes
    calm = undisturbed(tiny, tmp_path, colocate=None, **SPLIT)
    started = start_on(cluster, tiny, tmp_path, "killed", **SPLIT, num_rollout=STEPS)
    started.wait_for_line("step 3 |", 200)
    with paused(started):
        add_spare(cluster)
    started.wait_for_line("step 4 |", 100)
    cluster.remove_node(of_training, allow_graceful=False)
    done = started.finish(300)
    assert done.code == 0, done.output
    assert "(training ranks 0) is lost: the machine went down, or Ray ended on it" in done.output
    assert "training continues on " in done.output
    assert sum(done.steps("rollout/faults/ranks_lost")) == 1
    assert_equal_ends(tmp_path, done, calm)
    assert len(list((done.run_dir / "logs").glob("sglang*.log"))) == 1  # the server is the first one


def test_server_continues_on_a_spare_node_after_the_loss_of_its_node(tiny, tmp_path):
    calm = undisturbed(tiny, tmp_path, colocate=None, **SPLIT)
    with two_nodes(head_trains=True) as (cluster, of_server):
        started = start_on(cluster, tiny, tmp_path, "killed", **SPLIT, num_rollout=STEPS)
        started.wait_for_line("step 3 |", 200)
        with paused(started):
            add_spare(cluster)
        started.wait_for_line("step 4 |", 100)
        cluster.remove_node(of_server, allow_graceful=False)
        done = started.finish(300)
    assert done.code == 0, done.output
    assert "servers continue on " in done.output
    assert sum(done.steps("rollout/faults/servers_replaced")) == 1
    assert sum(done.steps("rollout/faults/ranks_lost")) == 0
    assert_equal_ends(tmp_path, done, calm)


def test_colocated_node_is_replaced_by_a_spare_one_whenever_it_is_lost(nodes, tiny, tmp_path):
    """During generation, in training, and in a weight update: a rank and a server move together."""
    cluster, lost = nodes
    calm = undisturbed(tiny, tmp_path)
    started = start_on(cluster, tiny, tmp_path, "killed", **COLOCATED, num_rollout=STEPS)
    timeline = started.run_dir / "timeline/train-rank-0.jsonl"
    for nth, call in ((2, None), (5, "train"), (8, kills.UPDATE)):
        started.wait_for_line(f"step {nth - 2} |", 200)
        spare = add_spare(cluster)
        started.wait_for_line(f"step {nth} |", 200)
        since_ns = time.monotonic_ns()
        if call is not None:
            assert kills.wait_for_call(started, timeline, since_ns, call, 0, time.monotonic() + 200)
        cluster.remove_node(lost, allow_graceful=False)
        started.wait_for_line(f"step {nth + 2} |", 200)
        lost = spare
    done = started.finish(300)
    assert done.code == 0, done.output
    assert "(training ranks 0; rollout GPUs 0) is lost: the machine went down, or Ray ended on it" in done.output
    assert done.output.count("training continues on ") == 3
    assert sum(done.steps("rollout/faults/ranks_lost")) == 3
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-4
    assert_equal_ends(tmp_path, done, calm)


@pytest.mark.parametrize("flags", [SPLIT, COLOCATED], ids=["split", "colocated"])
def test_lost_node_without_a_spare_ends_the_run_by_name(nodes, tiny, tmp_path, flags):
    cluster, of_training = nodes
    started = start_on(cluster, tiny, tmp_path, "lost", **flags, num_rollout=5000)
    started.wait_for_line("step 1 |", 200)
    cluster.remove_node(of_training, allow_graceful=False)
    lost = time.monotonic()
    done = started.finish(120)
    assert done.code == 75 and time.monotonic() - lost < 60, done.output
    assert re.search(
        r"\(training ranks 0(; rollout GPUs 0)?\) is lost: .*; its replacement failed: no other node has 1 free",
        done.output,
    )


def test_rank_that_is_lost_again_and_again_ends_the_run_by_name(tiny, tmp_path):
    started = start(tiny, tmp_path, "lost")
    started.wait_for_line("step 0 |", 200)
    deadline = time.monotonic() + 200
    while started.process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess, IndexError, FileNotFoundError):
            kill_rank(started, 0)
        time.sleep(0.5)
    done = started.finish(60)
    assert done.code == 75, done.output
    assert "ranks were lost 4 times in one rollout" in done.summary["error"]
    assert done.left == []
