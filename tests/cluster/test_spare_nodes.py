"""Which GPUs of spare nodes take the place of lost ones; tests/end_to_end/test_rank_recovery.py loses nodes."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from slimrl.cluster import placement
from slimrl.cluster.engines.engine import Engine, EngineActorConfig, ServerSettings
from slimrl.cluster.launch import ActorSetup
from slimrl.cluster.nodes import watch as nodes_watch
from slimrl.cluster.nodes.comparison import NodesDifferError
from slimrl.cluster.nodes.watch import SpareNodes
from slimrl.cluster.placement import EnginePart, GpuBundle, GpuBundles, InsufficientGpusError, PlacementPlan
from slimrl.processes import ProcessStartError

PLAN = PlacementPlan(total=4, train=range(2), rollout=range(2, 4), per_engine=1)


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs of training on node a, two of servers on b; Ray has placed the bundles of dead nodes on c."""
    made = GpuBundles.__new__(GpuBundles)
    made.plan = PLAN
    made.gpus = [GpuBundle(index, "aabb"[index], f"ip of {'aabb'[index]}", index % 2) for index in range(4)]
    made._moving = threading.Lock()
    made.alive, made.placed = {"a", "b", "c"}, True
    monkeypatch.setattr(placement, "_living_nodes", lambda: made.alive)
    monkeypatch.setattr(made, "_is_placed", lambda: made.placed)
    monkeypatch.setattr(
        made,
        "_locate",
        lambda bundles, _: [GpuBundle(bundle, "c", "ip of c", 6 + number) for number, bundle in enumerate(bundles)],
    )
    return made


def nodes_of(gpus: GpuBundles) -> str:
    return "".join(gpu.node for gpu in gpus.gpus)


def test_servers_follow_their_gpus_as_soon_as_ray_has_others(gpus):
    assert gpus.follow() == []  # no node is lost
    gpus.alive, gpus.placed = {"a", "c"}, False
    assert gpus.follow() == []  # there is no spare one yet
    gpus.placed = True
    assert [gpu.gpu_id for gpu in gpus.follow()] == [6, 7]
    assert nodes_of(gpus) == "aacc"
    assert gpus.follow() == []


def test_training_and_servers_follow_their_own_gpus_only(gpus):
    gpus.alive = {"c"}
    assert [gpu.bundle for gpu in gpus.relocate(node_is_lost=True)] == [0, 1]
    assert nodes_of(gpus) == "ccbb"
    gpus.alive = {"a", "c"}
    assert gpus.relocate(node_is_lost=False) == []  # a node of servers alone that is lost does not matter here
    assert [gpu.bundle for gpu in gpus.follow(range(2, 4))] == [2, 3]


@pytest.mark.parametrize("plan", [PlacementPlan(4, range(3), range(3), 1), PlacementPlan(4, range(1), range(1, 4), 1)])
def test_servers_beside_training_follow_it_and_not_those_of_other_nodes(gpus, plan):
    """A node with both, colocated or with GPUs of their own: the driver moves both, and all its GPUs at once."""
    gpus.plan = plan
    gpus.alive = {"b", "c"}
    assert gpus.follow(set(plan.rollout) - gpus.beside_training()) == []
    assert [gpu.bundle for gpu in gpus.relocate(node_is_lost=True)] == [0, 1]
    assert nodes_of(gpus) == "ccbb"


def test_driver_and_rollout_manager_find_the_same_gpus_in_whatever_order_they_look(gpus, monkeypatch):
    """The driver moves the node with training alone, the manager both nodes: Ray's GPUs per bundle are what counts."""
    place = {0: ("d", 1), 1: ("d", 0), 2: ("c", 1), 3: ("c", 0)}
    found = {
        bundle: GpuBundle(bundle, node, f"10.0.0.{'cd'.index(node)}", gpu) for bundle, (node, gpu) in place.items()
    }
    monkeypatch.setattr(gpus, "_locate", lambda bundles, _: placement.in_order(found[bundle] for bundle in bundles))
    before, gpus.alive = list(gpus.gpus), {"c", "d"}
    gpus.follow()
    of_manager = list(gpus.gpus)
    gpus.gpus = before
    gpus.relocate(node_is_lost=True)
    assert gpus.gpus[:2] == of_manager[:2]
    # actors of the lost node are on these bundles already: an index keeps its own, whatever Ray's order of GPUs
    assert [(gpu.bundle, gpu.gpu_id) for gpu in gpus.gpus[:2]] == [(0, 1), (1, 0)]


@pytest.mark.parametrize(
    ("places", "moved"),
    [("aabb", False), ("c?bb", False), ("ccbb", True), ("cdbb", True), ("ddbb", False)],
    ids=["not noticed", "one GPU waits", "moved", "on two nodes", "on a node that is lost too"],
)
def test_node_has_moved_when_ray_has_reserved_others_for_all_of_its_gpus(gpus, monkeypatch, places, moved):
    gpus.group, gpus.alive = None, {"a", "b", "c"} | ({"d"} if places == "cdbb" else set())
    table = {"bundles_to_node_id": {bundle: node for bundle, node in enumerate(places) if node != "?"}}
    monkeypatch.setattr(placement, "placement_group_table", lambda _: table)
    assert gpus.has_moved("a") == moved
    assert not gpus.has_moved("e")  # nothing of the run was there


def test_gpus_of_one_lost_node_on_several_are_rejected(gpus, monkeypatch):
    spread = [GpuBundle(2, "c", "ip of c", 0), GpuBundle(3, "d", "ip of d", 0)]
    monkeypatch.setattr(gpus, "_locate", lambda bundles, _: spread)
    gpus.alive = {"a", "c", "d"}
    with pytest.raises(InsufficientGpusError, match="are on several, ip of c, ip of d: add whole nodes"):
        gpus.follow()


def test_driver_watches_the_nodes_that_servers_continue_on(gpus, caplog):
    watched, logged = [], []
    watch = SimpleNamespace(follow=lambda gpus, plan, replaceable: watched.append("".join(gpu.node for gpu in gpus)))
    logs = SimpleNamespace(follow=lambda nodes: logged.append(nodes), wait=lambda: None)
    spares = SpareNodes(SimpleNamespace(use_fault_tolerance=True), gpus, None, watch, logs)
    spares.follow_servers()
    gpus.alive = {"c"}  # the node of training is lost too, which is not this method's
    assert watched == []
    spares.follow_servers()
    assert (watched, logged) == (["aacc"], [{"c"}])
    assert "servers continue on ip of c" in caplog.text


def test_replacement_that_ray_put_on_a_lost_node_is_placed_once_more():
    ends = [RayActorError(), None]

    async def ready() -> None:
        if (end := ends.pop(0)) is not None:
            raise end

    engine = Engine.__new__(Engine)
    engine._parts, engine._placements = [EnginePart("b", (2,))], 0
    made = []

    def actor(rank: int, part: EnginePart) -> SimpleNamespace:
        made.append(part.node)
        return SimpleNamespace(
            __ray_ready__=SimpleNamespace(remote=ready), watch=SimpleNamespace(remote=lambda: len(made))
        )

    engine._actor = actor
    engine._place()
    asyncio.run(engine.placed())
    assert (made, engine._watches, engine._placements) == (["b", "b"], [2], 2)  # each has a name of its own
    ends[:] = [RayActorError(), RayActorError()]
    with pytest.raises(RayActorError):
        asyncio.run(engine.placed())


@pytest.mark.parametrize("differs", [False, True])
def test_replacement_of_a_server_is_where_ray_has_put_it(gpus, tmp_path, differs):
    checked = []

    async def check(node: str) -> None:
        checked.append(node)
        if differs:
            raise NodesDifferError("another version of torch")

    async def ready() -> None: ...

    engine = Engine.__new__(Engine)
    engine.settings = ServerSettings(0, "model", 2, 0, {}, False, False, life=1, keeps_port=True, port=3000)
    engine._gpus, engine._parts = gpus, [EnginePart("b", (2, 3))]
    config = EngineActorConfig(tmp_path, "info", ActorSetup(tmp_path, {}))
    engine._config = dataclasses.replace(config, check_node=check)
    engine._actors = [SimpleNamespace(__ray_ready__=SimpleNamespace(remote=ready))]
    asyncio.run(engine._take_over_spares())
    assert (engine._parts, checked, engine.settings.port) == ([EnginePart("b", (2, 3))], [], 3000)  # the node is up
    gpus.alive = {"a", "c"}
    if differs:
        with pytest.raises(
            ProcessStartError, match=r"server 0\.1 cannot start on a spare node: another version of torch"
        ):
            asyncio.run(engine._take_over_spares())
        return
    asyncio.run(engine._take_over_spares())
    assert (engine._parts, checked) == ([EnginePart("c", (2, 3))], ["c"])
    assert engine.settings.port is None  # it may be taken there, and the address is another anyway


def test_lost_node_of_training_is_no_longer_watched_while_its_spare_is_compared(gpus, monkeypatch):
    done = []
    watch = SimpleNamespace(follow=lambda gpus, plan, replaceable: done.append("watch"))
    logs = SimpleNamespace(follow=lambda nodes: done.append(f"logs of {nodes}"), wait=lambda: None)
    monkeypatch.setattr(nodes_watch, "check_nodes", lambda *_: done.append("compare"))
    gpus.alive = {"b", "c"}
    SpareNodes(SimpleNamespace(use_fault_tolerance=True), gpus, None, watch, logs).take_over(node_is_lost=True)
    assert done == ["watch", "compare", "logs of {'c'}"]
