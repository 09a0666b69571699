"""Ray moves the GPUs of a lost node with several to a spare one: two processes find them apart from each other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from slimrl.cluster.placement import ENGINE_SHARE, TRAIN_SHARE, GpuBundle, GpuBundles, PlacementPlan
from tests.end_to_end.ray_nodes import NODE, empty_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ANSWER_S = 100


@contextlib.contextmanager
def cluster_of(*nodes_gpus: int) -> Iterator[tuple[Cluster, list[Any]]]:
    """A head without GPUs and nodes with these, all on this machine."""
    with empty_cluster() as (cluster, folder):
        try:
            cluster.add_node(**NODE | {"num_gpus": 0}, resources={"head": 1}, temp_dir=folder)
            nodes = [cluster.add_node(**NODE | {"num_gpus": count}, temp_dir=folder) for count in nodes_gpus]
            ray.init(address=cluster.address, log_to_driver=False)
            yield cluster, nodes
        finally:
            ray.shutdown()


@ray.remote(num_cpus=0)
class Member:
    """A training rank or a server."""

    def gpu(self) -> str:
        return str(ray.get_gpu_ids()[0])


@ray.remote(num_cpus=0, max_concurrency=3, resources={"head": 0.1})
class Manager:
    """The rollout manager with its own copy of the GPUs, whose servers follow each in a thread."""

    def __init__(self, gpus: GpuBundles) -> None:
        self._gpus = gpus

    def follow(self) -> list[GpuBundle]:
        self._gpus.follow()
        return list(self._gpus.gpus)


def members(gpus: GpuBundles, share: float) -> list[Any]:
    actor: Any = Member
    return [actor.options(**gpus.options(index, share)).remote() for index in range(2)]


def test_driver_and_rollout_manager_find_the_same_gpus_beside_ranks_and_servers():
    with cluster_of(2, 2) as (cluster, nodes):
        gpus = GpuBundles(PlacementPlan(4, range(4), range(4), 1))
        before = list(gpus.gpus)
        assert [before[0].node, before[2].node] == [before[1].node, before[3].node] != [before[0].node] * 2
        actor: Any = Manager
        manager = actor.remote(gpus)
        members(gpus, TRAIN_SHARE), members(gpus, ENGINE_SHARE)
        assert ray.get(manager.follow.remote(), timeout=ANSWER_S) == before
        assert not gpus.has_moved(before[0].node)
        cluster.add_node(**NODE | {"num_gpus": 2}, temp_dir=cluster.head_node.get_temp_dir_path())
        (lost,) = [node for node in nodes if node.node_id == before[0].node]
        cluster.remove_node(lost, allow_graceful=False)

        while not gpus.lost(range(4)):  # an actor that Ray puts on the node before is placed once more
            time.sleep(0.1)
        servers = members(gpus, ENGINE_SHARE)  # by the manager, before it knows where they will be
        assert len(gpus.relocate(node_is_lost=True)) == 2
        ranks = members(gpus, TRAIN_SHARE)
        assert gpus.gpus[2:] == before[2:] and gpus.gpus[0].node == gpus.gpus[1].node not in {
            gpu.node for gpu in before
        }
        for running in (servers, ranks):
            found = ray.get([member.gpu.remote() for member in running], timeout=ANSWER_S)
            assert found == [str(gpu.gpu_id) for gpu in gpus.gpus[:2]]
        # beside both, several servers look at once
        for found in ray.get([manager.follow.remote() for _ in range(3)], timeout=ANSWER_S):
            assert found == gpus.gpus
        ray.kill(servers[0])  # and is replaced by itself
        again = members(gpus, ENGINE_SHARE)[0]
        assert ray.get(again.gpu.remote(), timeout=ANSWER_S) == str(gpus.gpus[0].gpu_id)
        gpus.release()
