"""Runs over machines with networks, host names and shared memory of their own: started as on a cluster, and faults.

Each fault ends the run by name, or heals.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

import slimrl
from tests.conftest import PATIENCE
from tests.end_to_end.clocks import LIBRARY, clock_ahead
from tests.end_to_end.conftest import Tiny
from tests.end_to_end.harness import ROOT, Finished, Started
from tests.end_to_end.nodes import OVER_TWO_NODES, TOKEN, Cluster, cluster, end_with_power, outputs
from tests.machines import ADDRESSES, why_not
from tests.mooncake import mooncake
from tests.reward_models import write_reward_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=f"machines: {why_not()}"),
    pytest.mark.timeout(600),
]
NAMED_WITHIN_S = 30.0
STEPS = 40  # seconds more than a fault takes to happen


def run_over_two(made: Cluster, before_second: Callable[[], object] = list, **flags: object) -> list[Finished]:
    """Runs a job over machines 0 and 1; `before_second` is called before the script of machine 1 starts."""
    given = made.flags("run", **(OVER_TWO_NODES | {"num_rollout": 2} | flags))
    head = made.script(0, given)
    before_second()
    second = made.script(1, given)
    return [head.finish(300), second.finish(90)]


def flags_that_save(made: Cluster, **flags: object) -> list[str]:
    """The flags of a run over machines 0 and 1 that saves every step in the shared folder."""
    checkpoints = {"save": made.shared / "checkpoints", "load": made.shared / "checkpoints", "save_interval": 1}
    return made.flags("run", **(OVER_TWO_NODES | checkpoints | {"num_rollout": 5000} | flags))


def started_over_two(
    made: Cluster, of_second: dict[str, str] | None = None, *, resume: bool = False, **flags: object
) -> tuple[Started, Started]:
    """A job over machines 0 and 1 that has trained and saved three steps; `of_second` are variables of machine 1.

    With `resume` machine 1 joins a later head too.
    """
    given = flags_that_save(made, **flags)
    head, second = made.script(0, given), made.script(1, given, resume=resume, **(of_second or {}))
    head.wait_for_line("step 2 |", 300)
    return head, second


def first_step_after(made: Cluster) -> int:
    """The step after that of the newest checkpoint in the shared folder."""
    return int((made.shared / "checkpoints/latest_checkpointed_iteration.txt").read_text()) + 1


def test_recipe_trains_over_two_machines_of_which_one_joins_late(tiny: Tiny, tmp_path: Path):
    with cluster(tiny, tmp_path, 2) as made:
        folder = made.shared / "run"
        folder.mkdir()
        made.machines.run(1, "mount", "-t", "tmpfs", "tmpfs", str(folder))  # its run folder is its own
        head, second = run_over_two(
            made,
            before_second=lambda: time.sleep(8),
            check_weight_update_equal=True,
            save=tmp_path / "checkpoints",
        )
        assert (head.code, second.code) == (0, 0), outputs(head, second)
        assert "2 of 2 nodes have joined: 10.77.31.1, 10.77.31.2" in head.output
        assert "the weights of every engine equal the trained ones, bit for bit" in head.output
        assert max(head.steps("train_rollout_logprob_abs_diff_max")) < 1e-4
        assert head.steps("weight_version") == ["0", "1"]
        assert (head.left, second.left, made.left(0), made.left(1)) == ([], [], [], [])
        assert "the Ray head at 10.77.31.1:6379 has ended; ending this node" in second.output
        # the head's run folder has the logs of both
        logs = folder / "logs"
        own = made.machines.run(1, "ls", str(logs)).split()
        assert "train-rank1.log" in own and len(own) > 1
        assert {path.name for path in logs.iterdir()} > {"main.log", "train-rank0.log", *own}
        for name in own:
            assert made.machines.run(1, "cat", str(logs / name)) == (logs / name).read_text()
        assert (logs / "train-rank1.log").stat().st_size > 0


def test_node_with_another_checkout_or_a_folder_of_its_own_is_refused(tiny: Tiny, tmp_path: Path):
    with cluster(tiny, tmp_path, 2) as made:
        module = Path(slimrl.__file__).parent / "engines" / "protocol.py"
        (tmp_path / "other.py").write_text(module.read_text() + "\n# as in another commit\n")
        made.machines.run(1, "mount", "--bind", str(tmp_path / "other.py"), str(module))
        flags = made.flags("run", **OVER_TWO_NODES, save="/tmp/checkpoints")
        head, second = made.script(0, flags), made.script(1, flags)
        second.wait_for_line("joined the Ray head", 90)
        joined = time.monotonic()
        head, second = head.finish(120), second.finish(60)
        report("exit of the head after both have joined", joined, NAMED_WITHIN_S * PATIENCE)  # the driver starts first
        assert (head.code, second.code) == (2, 0), outputs(head, second)
        assert re.search(
            r"node 10\.77\.31\.2 has other versions than the driver's node 10\.77\.31\.1: slimrl's code \w{12} \(here"
            r" \w{12}\): install the same lock and use the same checkout on every node; node 10\.77\.31\.2 has another"
            r" folder at --save /tmp/checkpoints than the driver's node",
            head.output,
        ), head.output
        assert "step 0" not in head.output
        assert (head.left, second.left, made.left(0), made.left(1)) == ([], [], [], [])


def test_node_with_another_ray_is_refused_at_once_and_the_head_says_so(tiny: Tiny, tmp_path: Path):
    with cluster(tiny, tmp_path, 2) as made:
        module = Path(ray.__file__).parent / "_version.py"
        (tmp_path / "version.py").write_text(module.read_text().replace(ray.__version__, "2.1.0"))
        made.machines.run(1, "mount", "--bind", str(tmp_path / "version.py"), str(module))
        flags = made.flags("run", **OVER_TWO_NODES)
        head = made.script(0, flags)
        head.wait_for_line("1 of 2 nodes have joined", 60)
        second = made.script(1, flags)
        began = time.monotonic()
        done = [head.finish(60), second.finish(60)]
        report("exit of both after the start of machine 1", began, NAMED_WITHIN_S)
        assert [one.code for one in done] == [1, 1], outputs(*done)
        assert (
            "this node has other versions than the Ray head at 10.77.31.1:6379: install the same lock" in done[1].output
        )
        assert "Ray: 2.1.0" in done[1].output  # Ray's own lines
        assert re.search(
            r"the node with RANK=1, machine1, has another Ray or Python than the head: install the same lock on every"
            r" node .*Ray: 2\.1\.0",
            done[0].output,
        ), done[0].output
        assert [one.left for one in done] == [[], []]
        assert (made.left(0), made.left(1)) == ([], [])


def test_rank_that_is_started_on_two_machines_is_refused(tiny: Tiny, tmp_path: Path):
    with cluster(tiny, tmp_path, 3) as made:
        flags = made.flags("run", **OVER_TWO_NODES)
        # one of the three that the head waits for is missing, so that both of RANK 1 join while it waits
        head, *others = [made.script(number, flags, nodes=3, RANK=rank) for number, rank in enumerate("011")]
        for other in others:
            other.wait_for_line("joined the Ray head", 90)
        joined = time.monotonic()
        done = head.finish(90)
        report("exit of the head after both have joined", joined, NAMED_WITHIN_S + PATIENCE * 5)
        others = [other.finish(60) for other in others]
        assert done.code == 1, outputs(done, *others)
        assert "2 nodes were started with RANK=1: 10.77.31.2, 10.77.31.3; give each node its own RANK" in done.output
        assert [other.code for other in others] == [0, 0]  # the head's node reports the outcome
        assert [made.left(number) for number in range(3)] == [[], [], []]


def test_lost_link_for_five_seconds_a_slow_link_and_a_clock_that_is_ahead_change_nothing(tiny: Tiny, tmp_path: Path):
    if missing := [name for name in ("gcc", "tc") if shutil.which(name) is None]:
        pytest.skip(f"a clock that is off and a slow link need {missing[0]} in the PATH")
    with cluster(tiny, tmp_path, 2) as made:
        head, second = started_over_two(made, clock_ahead(tmp_path), num_rollout=8)
        ahead = made.machines.run(1, "env", f"LD_PRELOAD={tmp_path / LIBRARY}", "date", "+%s")
        assert 3590 < int(ahead) - time.time() < 3610
        made.machines.cut(1)
        time.sleep(5)
        made.machines.cut(1, "up")
        made.machines.throttle(1, "20mbit")
        done = [head.finish(300), second.finish(90)]
        assert [one.code for one in done] == [0, 0], outputs(*done)
        assert done[0].steps("weight_version") == [str(step) for step in range(8)]
        assert max(done[0].steps("train_rollout_logprob_abs_diff_max")) < 1e-4


def test_node_that_loses_its_power_ends_the_run_by_name(tiny: Tiny, tmp_path: Path):
    with cluster(tiny, tmp_path, 2) as made:
        head, second = started_over_two(made)
        end_with_power(second)
        lost = time.monotonic()
        done = head.finish(120)
        report("exit of the head", lost, NAMED_WITHIN_S)
        assert done.code == 75, done.output
        assert (
            "node 10.77.31.2 (training ranks 1; rollout GPUs 1) is lost: the machine went down, or Ray" in done.output
        )
        assert "10.77.31.2" in done.summary["error"]
        assert (done.left, made.left(0)) == ([], [])
        second.kill_everything()


def test_head_that_loses_its_power_is_named_and_the_next_one_continues_the_run(tiny: Tiny, tmp_path: Path):
    """The launcher starts the script of machine 0 again; that of machine 1 runs under scripts/resume.sh all along."""
    with cluster(tiny, tmp_path, 2) as made:
        head, second = started_over_two(made, resume=True, num_rollout=STEPS)
        end_with_power(head)
        lost = time.monotonic()
        second.wait_for_line("exit code 75: node 1 joins again in case the head starts another try", 90)
        report("exit of machine 1", lost, NAMED_WITHIN_S)
        named = (
            "lost the Ray head at 10.77.31.1:6379: it ended before its script did: its processes were killed, or its"
        )
        assert named in second.log.read_text()
        assert second.processes("raylet") == []
        head.kill_everything()
        continued = first_step_after(made)
        assert 2 < continued < STEPS
        again = made.script(0, flags_that_save(made, num_rollout=STEPS), resume=True)
        done = [again.finish(300), second.finish(90)]
        assert [one.code for one in done] == [0, 0], outputs(*done)
        assert f"running rollouts {continued} to {STEPS - 1}" in done[0].output
        assert max(done[0].steps("train_rollout_logprob_abs_diff_max")) < 1e-4
        assert "node 1 ends: the run has ended" in done[1].output
        assert (done[0].left, done[1].left, made.left(1)) == ([], [], [])


def test_lost_link_ends_both_sides_by_name_and_the_same_command_resumes(tiny: Tiny, tmp_path: Path):
    with cluster(tiny, tmp_path, 2) as made:
        head, second = started_over_two(made, num_rollout=STEPS)
        made.machines.cut(1)
        lost = time.monotonic()
        head.wait_for_line("has not answered on the network for", 60)  # a warning
        report("warning of the head", lost, NAMED_WITHIN_S)
        second.wait_for_line("no answer on the network for", 60)
        report("warning of machine 1", lost, NAMED_WITHIN_S)
        second = second.finish(60)
        report("exit of machine 1", lost, NAMED_WITHIN_S + 5 * PATIENCE)
        done = [head.finish(60), second]
        report("exit of the head", lost, NAMED_WITHIN_S + 5 * PATIENCE)
        assert [one.code for one in done] == [75, 75], outputs(*done)
        whom = r"node 10\.77\.31\.2 \(training ranks 1; rollout GPUs 1\)"
        warning = rf"WARNING {whom} has not answered on the network for 1\d s"
        assert re.search(warning, done[0].output), done[0].output
        assert re.search(
            rf"ERROR no answer on the network from {whom} for 2\d s"
            r" \(--node-timeout-seconds 20\): look for a lost link",
            done[0].output,
        ), done[0].output
        assert "lost the Ray head at 10.77.31.1:6379: no answer on the network for 2" in done[1].output
        assert (done[0].left, done[1].left, made.left(0), made.left(1)) == ([], [], [], [])

        made.machines.cut(1, "up")
        continued = first_step_after(made)
        assert 2 < continued < STEPS
        flags = flags_that_save(made, num_rollout=STEPS)
        again, second = made.script(0, flags), made.script(1, flags)
        done = [again.finish(300), second.finish(90)]
        assert [one.code for one in done] == [0, 0], outputs(*done)
        assert f"running rollouts {continued} to {STEPS - 1}" in done[0].output
        assert max(done[0].steps("train_rollout_logprob_abs_diff_max")) < 1e-4


def test_spare_machine_takes_the_place_of_one_whose_link_is_lost(tiny: Tiny, tmp_path: Path):
    with cluster(tiny, tmp_path, 3) as made:
        steps = 4 * STEPS  # the spare machine joins meanwhile
        flags = {"num_rollout": steps, "rollout_num_gpus_per_engine": 1, "use_fault_tolerance": True}
        head, second = started_over_two(made, **flags)
        spare = made.script(2, flags_that_save(made, **flags), nodes=3)
        spare.wait_for_line("joined the Ray head", 60)
        made.machines.cut(1)
        lost = time.monotonic()
        head.wait_for_line("has not answered on the network for", 60)
        report("warning of the head", lost, NAMED_WITHIN_S)
        head.wait_for_line("training continues on 10.77.31.3", 200)
        report("training on the spare machine", lost, 150)
        done = [head.finish(300), second.finish(90), spare.finish(90)]
        report("end of the run", lost, 300)
        assert [one.code for one in done] == [0, 75, 0], outputs(*done)
        assert "lost the Ray head at 10.77.31.1:6379: no answer on the network for 2" in done[1].output
        assert sum(done[0].steps("rollout/faults/ranks_lost")) == 1
        assert done[0].steps("weight_version") == [str(step) for step in range(steps)]
        assert max(done[0].steps("train_rollout_logprob_abs_diff_max")) < 1e-4
        assert (made.left(0), made.left(2)) == ([], [])
        # of the server that ended with its node: SGLang removes it when the next one starts there
        assert [name for name in made.left(1) if not name.startswith("sglang_loads_")] == []


def with_a_reward_model(tiny: Tiny, folder: Path) -> dict[str, object]:
    """Flags of a run that trains and generates on machine 0, and has the server of its reward model on machine 1."""
    from transformers import AutoTokenizer

    model = write_reward_model(folder / "judge", AutoTokenizer.from_pretrained(tiny.model), "Qwen3", seed=5)
    here = {"actor_num_gpus_per_node": 1, "num_gpus_per_node": 1, "colocate": True}
    there = {"rm_type": "reward_model", "rm_model": model, "label_key": None, "rm_num_gpus": 1}
    return here | there | {"rm_num_gpus_per_engine": 1, "use_fault_tolerance": True, "num_rollout": 3 * STEPS}


@pytest.mark.parametrize("lose", ["power", "link"])
def test_server_of_a_reward_model_continues_on_a_spare_machine(lose: str, tiny: Tiny, tmp_path: Path):
    with cluster(tiny, tmp_path, 3) as made:
        given = made.flags("run", **with_a_reward_model(tiny, tmp_path))
        head, second = made.script(0, given), made.script(1, given)
        head.wait_for_line("step 2 |", 300)
        spare = made.script(2, given, nodes=3)
        spare.wait_for_line("joined the Ray head", 60)
        if lose == "power":
            end_with_power(second)
        else:
            made.machines.cut(1)
        lost = time.monotonic()
        head.wait_for_line("SGLang server _reward0", 200)
        report("loss of the server named", lost, 150)
        head.wait_for_line("servers continue on 10.77.31.3", 200)
        report("server of the reward model on the spare machine", lost, 150)
        done = [head.finish(300), spare.finish(90)]
        second.kill_everything()
        assert [one.code for one in done] == [0, 0], outputs(*done)
        assert sum(done[0].steps("rollout/faults/servers_lost")) == 1
        assert sum(done[0].steps("rollout/faults/servers_replaced")) == 1
        assert len(done[0].steps("reward")) == 3 * STEPS
        assert len(set(done[0].steps("reward"))) > STEPS  # the model scores
        assert max(done[0].steps("train_rollout_logprob_abs_diff_max")) < 1e-4
        assert (done[0].left, done[1].left, made.left(0), made.left(2)) == ([], [], [], [])


def test_lost_machine_with_a_reward_model_ends_the_run_by_name_without_a_spare_one(tiny: Tiny, tmp_path: Path):
    with cluster(tiny, tmp_path, 2) as made:
        given = made.flags("run", **with_a_reward_model(tiny, tmp_path))
        head, second = made.script(0, given), made.script(1, given)
        head.wait_for_line("step 2 |", 300)
        end_with_power(second)
        lost = time.monotonic()
        done = head.finish(60)
        report("exit of the head", lost, NAMED_WITHIN_S + 5 * PATIENCE)
        second.kill_everything()
        assert done.code == 75, done.output
        assert "ERROR node 10.77.31.2 (reward GPUs 0) is lost: the machine went down, or Ray ended on it" in done.output
        assert (done.left, made.left(0)) == ([], [])


def test_server_on_a_machine_that_joins_sends_its_log_and_may_lose_its_power(tiny: Tiny, tmp_path: Path):
    with cluster(tiny, tmp_path, 3) as made:
        folder = made.shared / "run"
        folder.mkdir()
        made.machines.run(2, "mount", "-t", "tmpfs", "tmpfs", str(folder))  # its run folder is its own
        apart = {"actor_num_gpus_per_node": 1, "num_gpus_per_node": 1, "rollout_num_gpus": 1, "rollout_max_num_gpus": 2}
        flags = made.flags("run", num_rollout=500, use_fault_tolerance=True, **apart)
        head, second = made.script(0, flags), made.script(1, flags)
        head.wait_for_line("step 1 |", 300)
        joins = made.script(2, flags, nodes=3)
        head.wait_for_line("SGLang server 1 ", 120)  # "joined and waits for weights"
        head.wait_for_line("and serves", 120)
        copied = folder / "logs/sglang1.log"
        wait_until(lambda: copied.exists() and copied.stat().st_size > 0)
        here, there = copied.read_text(), made.machines.run(2, "cat", str(copied))
        end_with_power(joins)
        done = [head.finish(300), second.finish(90)]
        joins.kill_everything()
        assert [one.code for one in done] == [0, 0], outputs(*done)
        assert there.startswith(here)
        assert "its GPUs are returned to Ray" in done[0].output
        assert sum(done[0].steps("rollout/faults/servers_joined")) == 1
        assert max(done[0].steps("train_rollout_logprob_abs_diff_max")) < 1e-3
        assert (done[0].left, done[1].left, made.left(0), made.left(1)) == ([], [], [], [])


def report(event: str, since: float, limit: float) -> None:
    """Prints the seconds for the tables of docs/gpu-cluster.md; raises AssertionError from `limit` on."""
    seconds = time.monotonic() - since
    print(f"{event}: {seconds:.1f} s")
    assert seconds < limit, f"{event}: {seconds:.1f} s"


def wait_until(condition: Callable[[], bool], timeout: float = 30.0) -> None:
    """Raises AssertionError if the condition does not come true in time."""
    deadline = time.monotonic() + PATIENCE * timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


WEIGHTS_BYTES = 2 * 92_096  # of the toy in bf16
BF16 = {"bf16": True, "sglang_dtype": "bfloat16", "lr": 1e-6}
# What carries the weights to a server on a third machine, the layout of training over two, and the difference of
# log-probabilities: that of bf16 is due to rounding.
WAYS: dict[str, tuple[dict[str, object], float]] = {
    "broadcast": ({"pipeline_model_parallel_size": 2}, 1e-4),
    "disk": ({"tensor_model_parallel_size": 2, "update_weight_transport": "disk"}, 1e-4),
    "changes": ({"update_weight_mode": "delta", **BF16}, 0.3),
    "changed files": ({"update_weight_mode": "delta", "update_weight_transport": "disk", **BF16}, 0.3),
    "point-to-point": ({"tensor_model_parallel_size": 2, "update_weight_transfer_mode": "p2p"}, 1e-4),
    "mooncake": (
        {
            "tensor_model_parallel_size": 2,
            "update_weight_transfer_mode": "p2p",
            "update_weight_transport": "mooncake",
        },
        1e-4,
    ),
}


@pytest.mark.parametrize("names", [[name for name in WAYS if name != "mooncake"], ["mooncake"]], ids=" ".join)
def test_jobs_from_outside_train_with_each_transport_on_an_existing_cluster(
    names: list[str], tiny: Tiny, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    if "mooncake" in names:
        found = mooncake(tmp_path_factory)
        environment |= found | {"PYTHONPATH": ":".join([str(ROOT), *filter(None, [found.get("PYTHONPATH")])])}
    ray_start = ["ray", "start", "--block", "--num-gpus=1", "--num-cpus=2", "--object-store-memory=100000000"]
    outside = 3
    with cluster(tiny, tmp_path, 4) as made:
        head = [*ray_start, "--head", f"--node-ip-address={ADDRESSES[0]}", f"--dashboard-host={ADDRESSES[0]}"]
        nodes = [made.start(0, head, "ray", **environment)]
        nodes[0].wait_for_line("Ray runtime started", 60)
        join = [*ray_start, f"--address={ADDRESSES[0]}:6379"]
        nodes += [made.start(number, join, "ray", **environment) for number in (1, 2)]
        try:
            for node in nodes[1:]:
                node.wait_for_line("Ray runtime started", 60)
            for name in names:
                flags, limit = WAYS[name]
                if name in ("disk", "changed files"):
                    flags = flags | {"update_weight_disk_dir": tmp_path / "weights"}
                if name == "changed files":
                    flags = flags | {"update_weight_local_checkpoint_dir": tmp_path / "engine"}
                placement = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 1, "num_gpus_per_node": 1}
                given = {"num_rollout": 2, "rollout_num_gpus": 1, "check_weight_update_equal": True} | placement
                address = environment | {"RAY_ADDRESS": f"http://{ADDRESSES[0]}:8265"}
                done = made.script(outside, made.flags(name, **given | flags), name=name, **address).finish(300)
                assert done.code == 0, done.output
                assert f"using the Ray cluster at http://{ADDRESSES[0]}:8265" in done.output
                assert "the weights of every engine equal the trained ones, bit for bit" in done.output
                assert max(done.steps("train_rollout_logprob_abs_diff_max")) < limit
                assert done.steps("weight_version") == ["0", "1"]
                if name in ("changes", "changed files"):  # the update before the first step sends all
                    assert max(done.steps("perf/update_weights_wire_bytes")) < WEIGHTS_BYTES / 10
        finally:
            for node in nodes:
                node.kill_everything()
        assert made.left(outside) == []
