"""Nodes that SGLang would mistake for one machine are rejected; one machine or two machines are not."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import slimrl
from slimrl.cluster.engines.engine import Engine
from slimrl.cluster.nodes.comparison import NodeMark, place_node_mark, shared_memory_conflict, visible_marks
from slimrl.processes import ProcessStartError, stale_resources
from tests.machines import ADDRESSES, two_machines, why_not

A, B, C = (
    NodeMark(f"10.0.0.{number}", f"slimrl-node-{number}", network) for number, network in ((1, 7), (2, 8), (3, 8))
)
NODE = """
import json, sys
from slimrl.cluster.nodes.comparison import NodeMark, place_node_mark, visible_marks
with place_node_mark(sys.argv[1]) as mark:
    print(json.dumps([mark.address, mark.name, mark.network]), flush=True)
    marks = [NodeMark(*row) for row in json.loads(sys.stdin.readline())]
    print(json.dumps(sorted(visible_marks(marks))), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("seen", "pair"),
    [
        ([{A.name}, {B.name}, {C.name}], None),  # three machines
        ([{A.name}, {B.name, C.name}, {B.name, C.name}], None),  # two Ray nodes on one of two machines
        ([{A.name, B.name}, {A.name, B.name}, {C.name}], "10.0.0.1 and 10.0.0.2"),
        ([{A.name, C.name}, {B.name}, {A.name, C.name}], "10.0.0.1 and 10.0.0.3"),
    ],
)
def test_nodes_that_share_memory_but_not_a_network_are_rejected(seen, pair):
    why = shared_memory_conflict([A, B, C], seen)
    assert why is None if pair is None else f"the nodes {pair} share /dev/shm but not their network" in why


def test_engine_on_such_nodes_does_not_start_and_names_them():
    def actor(mark: NodeMark) -> types.SimpleNamespace:
        async def answer(value):
            return value

        methods = {"mark": lambda: answer(mark), "visible_marks": lambda marks: answer({one.name for one in marks})}
        stopped = []
        methods["stop"] = lambda _: answer(stopped.append(True))
        remote = {name: types.SimpleNamespace(remote=method) for name, method in methods.items()}
        return types.SimpleNamespace(stopped=stopped, **remote)

    engine = Engine.__new__(Engine)
    engine.settings = types.SimpleNamespace(label="SGLang server 0", life=0)
    engine._actors = [actor(A), actor(B)]
    with pytest.raises(ProcessStartError, match=r"SGLang server 0 cannot start: the nodes 10\.0\.0\.1 and 10\.0\.0\.2"):
        asyncio.run(engine.start(1.0))
    assert [one.stopped for one in engine._actors] == [[True], [True]]


def test_marker_is_visible_while_held_and_a_stale_one_is_removed_at_start(tmp_path):
    with place_node_mark("10.0.0.1", str(tmp_path)) as mark:
        assert visible_marks([mark, A], str(tmp_path)) == {mark.name}
    assert visible_marks([mark], str(tmp_path)) == set()
    killed = tmp_path / "slimrl-node-killed"
    killed.mkdir()
    stale_resources.own(killed).release()
    assert stale_resources.remove_stale(tmp_path / "empty", str(tmp_path)) == [str(killed)]


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=f"two machines: {why_not()}")
@pytest.mark.parametrize("own_shared_memory", [True, False])
def test_containers_of_one_host_are_distinguished_from_two_machines(own_shared_memory, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(slimrl.__file__).parent.parent)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with two_machines(tmp_path, own_shared_memory=own_shared_memory) as machines:
        nodes = [
            subprocess.Popen(machines.command(number, sys.executable, "-c", NODE, address), **pipes)
            for number, address in enumerate(ADDRESSES[:2])
        ]
        try:
            marks = [json.loads(node.stdout.readline()) for node in nodes]
            for node in nodes:
                print(json.dumps(marks), file=node.stdin, flush=True)
            seen = [json.loads(node.stdout.readline()) for node in nodes]
            for node in nodes:
                node.communicate("\n", timeout=20)
        finally:
            for node in nodes:
                node.kill()
    why = shared_memory_conflict([NodeMark(*row) for row in marks], seen)
    assert why is None if own_shared_memory else f"{ADDRESSES[0]} and {ADDRESSES[1]} share /dev/shm" in why
