"""Runs over machines with networks, host names and shared memory of their own: started as on a cluster, and faults.

Each fault ends the run by name, or heals.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

import slimrl
from tests.conftest import PATIENCE
from tests.end_to_end.conftest import Tiny
from tests.end_to_end.harness import Finished, Started
from tests.end_to_end.nodes import OVER_TWO_NODES, TOKEN, Cluster, cluster, end_with_power, outputs
from tests.machines import ADDRESSES, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=f"machines: {why_not()}"),
    pytest.mark.timeout(600),
]
NAMED_WITHIN_S = 30.0
END_S = 20.0  # from the message to the end of the driver's and the head's processes on a busy machine


def run_over_two(made: Cluster, before_second: Callable[[], object] = list, **flags: object) -> list[Finished]:
    """Runs a job over machines 0 and 1; `before_second` is called before the script of machine 1 starts."""
    job = made.train("run", **(OVER_TWO_NODES | {"num_rollout": 2} | flags))
    head = made.script(0, job)
    before_second()
    second = made.script(1, job)
    return [head.finish(300), second.finish(90)]


def started_over_two(
    made: Cluster, of_second: dict[str, str] | None = None, **flags: object
) -> tuple[Started, Started]:
    """A job over machines 0 and 1 that has trained and saved three steps; `of_second` are variables of machine 1."""
    checkpoints = {"save": made.shared / "checkpoints", "load": made.shared / "checkpoints", "save_interval": 1}
    job = made.train("run", **(OVER_TWO_NODES | checkpoints | {"num_rollout": 5000} | flags))
    head, second = made.script(0, job), made.script(1, job, **(of_second or {}))
    head.wait_for_line("step 2 |", 300)
    return head, second


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
        head, second = run_over_two(made, save="/tmp/checkpoints")
        assert (head.code, second.code) == (2, 0), outputs(head, second)
        assert re.search(
            r"node 10\.77\.31\.2 has other versions than the driver's node 10\.77\.31\.1: slimrl's code \w{12} \(here"
            r" \w{12}\): install the same lock and use the same checkout on every node; node 10\.77\.31\.2 has another"
            r" folder at --save /tmp/checkpoints than the driver's node",
            head.output,
        ), head.output
        assert "step 0" not in head.output
        assert (head.left, second.left, made.left(0), made.left(1)) == ([], [], [], [])


def test_node_with_another_ray_is_refused_at_once(tiny: Tiny, tmp_path: Path):
    with cluster(tiny, tmp_path, 2) as made:
        module = Path(ray.__file__).parent / "_version.py"
        (tmp_path / "version.py").write_text(module.read_text().replace(ray.__version__, "2.1.0"))
        made.machines.run(1, "mount", "--bind", str(tmp_path / "version.py"), str(module))
        head = made.script(0, ["true"])
        second = made.script(1, ["true"]).finish(120)
        assert second.code == 1 and second.seconds < 60, second.output
        assert (
            "this node has other versions than the Ray head at 10.77.31.1:6379: install the same lock" in second.output
        )
        assert "Ray: 2.1.0" in second.output  # Ray's own lines
        assert second.left == [] and made.left(1) == []
        head.kill_everything()  # it waits for another node


def test_rank_that_is_started_on_two_machines_is_refused(tiny: Tiny, tmp_path: Path):
    with cluster(tiny, tmp_path, 3) as made:
        # one of the three that the head waits for is missing, so that both of RANK 1 join while it waits
        nodes = [made.script(number, ["true"], nodes=3, RANK=rank) for number, rank in enumerate(("0", "1", "1"))]
        head, *others = [node.finish(240) for node in nodes]
        assert head.code == 1, outputs(head, *others)
        assert "2 nodes were started with RANK=1: 10.77.31.2, 10.77.31.3; give each node its own RANK" in head.output
        assert [other.code for other in others] == [0, 0]  # the head's node reports the outcome
        assert [made.left(number) for number in range(3)] == [[], [], []]


def test_lost_link_for_five_seconds_a_slow_link_and_a_clock_that_is_ahead_change_nothing(tiny: Tiny, tmp_path: Path):
    with cluster(tiny, tmp_path, 2) as made:
        head, second = started_over_two(made, clock_of_second(tmp_path), num_rollout=8)
        made.machines.cut(1)
        time.sleep(5)
        made.machines.cut(1, "up")
        made.machines.throttle(1, "20mbit")
        done = [head.finish(300), second.finish(90)]
        assert [one.code for one in done] == [0, 0], outputs(*done)
        assert done[0].steps("weight_version") == [str(step) for step in range(8)]
        assert max(done[0].steps("train_rollout_logprob_abs_diff_max")) < 1e-4


def clock_of_second(folder: Path) -> dict[str, str]:
    """The variable that sets the clock of the second machine an hour ahead; none without a compiler."""
    if (compiler := shutil.which("gcc")) is None:
        return {}
    library = folder / "shifted_clock.so"
    (folder / "shifted_clock.c").write_text(SHIFTED_CLOCK)
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(folder / "shifted_clock.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return {"LD_PRELOAD": str(library)}


def test_node_that_loses_its_power_ends_the_run_by_name(tiny: Tiny, tmp_path: Path):
    with cluster(tiny, tmp_path, 2) as made:
        head, second = started_over_two(made)
        end_with_power(second)
        lost = time.monotonic()
        done = head.finish(120)
        assert time.monotonic() - lost < NAMED_WITHIN_S
        assert done.code == 75, done.output
        assert (
            "node 10.77.31.2 (training ranks 1; rollout GPUs 1) is lost: the machine went down, or Ray" in done.output
        )
        assert "10.77.31.2" in done.summary["error"]
        assert (done.left, made.left(0)) == ([], [])
        second.kill_everything()


def test_lost_link_ends_both_sides_by_name(tiny: Tiny, tmp_path: Path):
    with cluster(tiny, tmp_path, 2) as made:
        head, second = started_over_two(made)
        made.machines.cut(1)
        lost = time.monotonic()
        head.wait_for_line("ERROR", 120)
        named = time.monotonic() - lost
        done = [head.finish(120), second.finish(60)]
        assert named < NAMED_WITHIN_S + 3 * PATIENCE, outputs(*done)  # the supervisor looks every second
        assert time.monotonic() - lost < NAMED_WITHIN_S + 2 * END_S
        assert [one.code for one in done] == [75, 75], outputs(*done)
        assert re.search(
            r"ERROR no answer on the network from node 10\.77\.31\.2 \(training ranks 1; rollout GPUs 1\) for 3\d s"
            r" \(--node-timeout-seconds 30\): look for a lost link",
            done[0].output,
        ), done[0].output
        assert "lost the Ray head at 10.77.31.1:6379: no answer on the network for 3" in done[1].output
        assert (done[0].left, done[1].left, made.left(0), made.left(1)) == ([], [], [], [])


def test_jobs_from_outside_train_with_each_transport_on_an_existing_cluster(tiny: Tiny, tmp_path: Path):
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    ray_start = ["ray", "start", "--block", "--num-gpus=1", "--num-cpus=2", "--object-store-memory=100000000"]
    outside = 3
    with cluster(tiny, tmp_path, 4) as made:
        head = [*ray_start, "--head", f"--node-ip-address={ADDRESSES[0]}", f"--dashboard-host={ADDRESSES[0]}"]
        nodes = [made.start(0, head, "ray", **token)]
        nodes[0].wait_for_line("Ray runtime started", 60)
        nodes += [
            made.start(number, [*ray_start, f"--address={ADDRESSES[0]}:6379"], "ray", **token) for number in (1, 2)
        ]
        for node in nodes[1:]:
            node.wait_for_line("Ray runtime started", 60)
        try:
            for name, flags in (
                ("broadcast", {"pipeline_model_parallel_size": 2}),
                ("disk", {"tensor_model_parallel_size": 2, **on_disk(tmp_path)}),
            ):
                placement = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 1, "num_gpus_per_node": 1}
                job = made.train(name, num_rollout=2, rollout_num_gpus=1, **placement, **flags)
                address = {"RAY_ADDRESS": f"http://{ADDRESSES[0]}:8265", "RAY_AUTH_MODE": "token"}
                done = made.script(outside, job, name=name, **address).finish(300)
                assert done.code == 0, done.output
                assert f"using the Ray cluster at http://{ADDRESSES[0]}:8265" in done.output
                assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-4
                assert done.steps("weight_version") == ["0", "1"]
        finally:
            for node in nodes:
                node.kill_everything()
        assert made.left(outside) == []


def on_disk(folder: Path) -> dict[str, object]:
    return {"update_weight_transport": "disk", "update_weight_disk_dir": folder / "weights"}


SHIFTED_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#define AHEAD 3600
#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
int clock_gettime(clockid_t clock, struct timespec *now) {
    static __typeof__(&clock_gettime) real;
    if (!real) real = (__typeof__(&clock_gettime))dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += AHEAD;
    return code;
}
int gettimeofday(struct timeval *now, void *zone) {
    REAL(gettimeofday);
    int code = real(now, zone);
    if (code == 0) now->tv_sec += AHEAD;
    return code;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
/* deadlines by this clock, for the kernel, whose clock is right */
static struct timespec back(const struct timespec *until) {
    struct timespec shifted = *until;
    shifted.tv_sec -= AHEAD;
    return shifted;
}
int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    REAL(sem_timedwait);
    struct timespec shifted = back(until);
    return real(semaphore, &shifted);
}
int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *until) {
    REAL(pthread_mutex_timedlock);
    struct timespec shifted = back(until);
    return real(mutex, &shifted);
}
"""
