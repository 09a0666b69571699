"""A disconnected node is reported soon; a node that answers at all is not."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import slimrl
from slimrl.cluster.nodes import watch as watch_module
from slimrl.cluster.nodes.watch import NodeWatch, ProbeIntervals, WatchedNode, nodes_of
from slimrl.cluster.placement import GpuBundle, PlacementPlan
from tests.machines import ADDRESSES, two_machines, why_not

FAST = ProbeIntervals(period_s=0.1, timeout_s=5.0, silent_after_s=0.5)
WATCHER = f"""
import logging, sys, time
from slimrl.cluster.nodes.watch import NodeWatch, ProbeIntervals, WatchedNode
logging.basicConfig(stream=sys.stdout, format="%(message)s")
node = WatchedNode("{ADDRESSES[1]}", 6380, "training ranks 2, 3")
spare = WatchedNode("{ADDRESSES[1]}", 6380, "rollout GPUs 2", required=False)
pace = ProbeIntervals(period_s=0.5, timeout_s=0.5, silent_after_s=1.5)
with NodeWatch([node, spare], pace, lost_after_s=4).running() as watch:
    print("watching", flush=True)
    for line in sys.stdin:
        while line == "lost\\n" and not watch.lost():
            time.sleep(0.1)
        print(watch.lost() or "none is lost", flush=True)
"""


def test_unresponsive_node_is_named_before_the_run_ends_because_of_it():
    pace = ProbeIntervals()
    assert pace.silent_after_s + pace.period_s + pace.timeout_s <= 15  # the least --node-timeout-seconds


def test_every_other_gpu_node_is_watched_and_described_by_its_roles():
    gpus = [GpuBundle(i, node, "", 0) for i, node in enumerate("aabbcc")]
    plan = PlacementPlan(6, range(3), range(3, 5), 1, (range(5, 6),))
    known = [
        {"NodeID": node, "NodeManagerAddress": f"10.0.0.{number}", "NodeManagerPort": 7000 + number, "Resources": {}}
        for number, node in enumerate("abcde")
    ]
    known[4]["Resources"] = {"CPU": 8.0, "node:__internal_head__": 1.0}
    assert nodes_of(gpus, plan, known, own="a") == [
        WatchedNode("10.0.0.1", 7001, "training ranks 2; rollout GPUs 0", trains=True),
        WatchedNode("10.0.0.2", 7002, "rollout GPUs 1; reward GPUs 0"),
        WatchedNode("10.0.0.4", 7004, "the head of Ray"),
    ]


def test_nodes_with_servers_are_not_required_or_have_a_replacement_where_servers_are_replaced():
    gpus = [GpuBundle(i, node, "", 0) for i, node in enumerate("abcd")]
    gpus += [GpuBundle(4 + i, node, "", 0) for i, node in enumerate("eef")]
    plan = PlacementPlan(7, range(2), range(1, 4), 1, (range(5, 6),), frozen_servers=(range(4, 5), range(6, 7)))
    known = [
        {"NodeID": node, "NodeManagerAddress": f"10.0.0.{number}", "NodeManagerPort": 7, "Resources": {}}
        for number, node in enumerate("abcdef")
    ]
    known[3]["Resources"] = {"node:__internal_head__": 1.0}
    found = nodes_of(gpus, plan, known, own="a", replaceable=True)
    assert [(node.what, node.required, node.replaceable_gpus, node.trains) for node in found] == [
        ("training ranks 1; rollout GPUs 0", True, 1, True),  # a spare node gets both
        ("rollout GPUs 1", False, 0, False),
        ("the head of Ray; rollout GPUs 2", True, 0, False),
        ("GPUs of frozen models 0; reward GPUs 0", True, 2, False),
        ("GPUs of frozen models 1", True, 1, False),
    ]
    assert all(node.required and not node.replaceable_gpus for node in nodes_of(gpus, plan, known, own="a"))


def test_node_of_critic_ranks_is_described():
    gpus = [GpuBundle(i, node, "", 0) for i, node in enumerate("abb")]
    plan = PlacementPlan(3, range(1), range(0), 1, critic=range(1, 3))
    known = [{"NodeID": "b", "NodeManagerAddress": "10.0.0.2", "NodeManagerPort": 7, "Resources": {}}]
    # nothing but training: a node with two free GPUs may replace it
    found = WatchedNode("10.0.0.2", 7, "critic ranks 0, 1", replaceable_gpus=2, trains=True)
    assert nodes_of(gpus, plan, known, own="a") == [found]
    known[0]["Resources"] = {"node:__internal_head__": 1.0}
    assert nodes_of(gpus, plan, known, own="a")[0].replaceable_gpus == 0


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(("free", "moved", "ended"), [(2, False, False), (0, True, False), (0, False, True)])
def test_lost_node_ends_the_run_unless_a_spare_one_is_free_or_has_been_reserved(
    monkeypatch, free, moved, ended, trains
):
    roles = "training ranks 2, 3; rollout GPUs 0" if trains else "reward GPUs 0"
    node = WatchedNode("10.0.0.2", 7, roles, replaceable_gpus=2, trains=trains, node_id="b")
    monkeypatch.setattr(watch_module.ray, "available_resources", lambda: {"GPU": float(free)})
    watch = NodeWatch([node], lost_after_s=30.0)
    watch._silent[node] = time.monotonic() - 40
    assert "10.0.0.2" in watch.lost()  # no spare node is allowed
    asked = []
    watch.allow_spares(lambda name: asked.append(name) or moved, of_training=False)
    if trains:
        assert "10.0.0.2" in watch.lost()  # of servers only
        watch.allow_spares(lambda name: asked.append(name) or moved, of_training=True)
        watch.allow_spares(lambda name: asked.append(name) or moved, of_training=False)  # changes nothing
    assert bool(watch.lost()) == ended and set(asked) <= {"b"}
    watch._nodes = []  # replaced, and a last answer arrives
    assert watch.lost() == watch.unreachable() == ""


def test_node_that_accepts_or_refuses_connections_is_not_named(caplog):
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as refuses:
        refuses.bind(("127.0.0.1", 0))  # bound, but not listening
        nodes = [WatchedNode(*one.getsockname(), "") for one in (listener, refuses)]
        with caplog.at_level(logging.WARNING, "slimrl"), NodeWatch(nodes, FAST).running() as watch:
            time.sleep(1.5)
            assert watch.unreachable() == ""
    assert caplog.messages == []


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=f"two machines: {why_not()}")
@pytest.mark.timeout(60)
def test_disconnected_machine_is_named_and_so_is_its_return(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(slimrl.__file__).parent.parent)}
    listen = "import socket, time; s = socket.create_server(('', 6380)); print('listens', flush=True); time.sleep(600)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with two_machines(tmp_path) as machines:
        other = subprocess.Popen(machines.command(1, sys.executable, "-c", listen), **pipes)
        watcher = subprocess.Popen(machines.command(0, sys.executable, "-c", WATCHER), **pipes)
        try:
            assert (other.stdout.readline(), watcher.stdout.readline()) == ("listens\n", "watching\n")
            time.sleep(1)
            machines.cut(1)
            cut = time.monotonic()
            named = sorted(watcher.stdout.readline() for _ in range(2))
            assert 1 < time.monotonic() - cut < 10
            assert named[0].startswith(f"node {ADDRESSES[1]} (rollout GPUs 2) has not answered on the network for ")
            assert named[1].startswith(
                f"node {ADDRESSES[1]} (training ranks 2, 3) has not answered on the network for "
            )
            watcher.stdin.write("lost\n")
            watcher.stdin.flush()
            lost = watcher.stdout.readline()
            assert 3 < time.monotonic() - cut < 12  # counted from the last answer
            # the servers of the other node are replaced
            needed = f"no answer on the network from node {ADDRESSES[1]} (training ranks 2, 3) for 4 s (--node-timeout-"
            assert lost.startswith(needed) and "rollout GPUs" not in lost
            machines.cut(1, "up")
            again = f"node {ADDRESSES[1]} answers on the network again\n"
            assert [watcher.stdout.readline() for _ in range(2)] == [again, again]
            assert watcher.communicate("now\n", timeout=20)[0] == "none is lost\n"
        finally:
            for process in (other, watcher):
                process.kill()
                process.wait(10)
