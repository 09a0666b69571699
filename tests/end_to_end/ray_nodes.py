"""A Ray cluster of nodes with one GPU each, on this machine, and runs on it, for the loss of a node."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private.node import Node
from ray.cluster_utils import Cluster

from tests.end_to_end import harness
from tests.end_to_end.conftest import Tiny
from tests.end_to_end.harness import Started

NODE = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False}
SPLIT = {"actor_num_gpus_per_node": 1, "rollout_num_gpus": 1, "num_gpus_per_node": 1}
COLOCATED = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 1, "num_gpus_per_node": 1, "colocate": True}


@contextlib.contextmanager
def empty_cluster() -> Iterator[tuple[Cluster, str]]:
    """A cluster without nodes, and the folder that its nodes are to have as `temp_dir`."""
    with (
        tempfile.TemporaryDirectory(prefix="slimrl-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", folder)  # where Cluster writes its address, without creating the folder
        (Path(folder) / "ray").mkdir()
        cluster = Cluster()
        try:
            yield cluster, folder
        finally:
            cluster.shutdown()


@contextlib.contextmanager
def two_nodes(*, head_trains: bool = False) -> Iterator[tuple[Cluster, Node]]:
    """The second one is not the head. It has the run's first GPU, for training, unless the head is to have it."""
    with empty_cluster() as (cluster, folder):
        head = cluster.add_node(**NODE, temp_dir=folder)
        while ((other := cluster.add_node(**NODE, temp_dir=folder)).node_id < head.node_id) == head_trains:
            cluster.remove_node(other)  # GPUs of one address are ordered by their nodes' ids
        yield cluster, other


def add_spare(cluster: Cluster) -> Node:
    """Adds a node with a free GPU."""
    return cluster.add_node(**NODE, temp_dir=cluster.head_node.get_temp_dir_path())


def launch_on(cluster: Cluster, tiny: Tiny, folder: Path, name: str, words: list[str]) -> Started:
    """Starts train.py with these flags in the cluster; its files are in `folder`."""
    return harness.launch(
        [
            sys.executable,
            str(harness.ROOT / "train.py"),
            *words,
            "--runs-dir",
            str(folder / "runs"),
            "--run-name",
            name,
        ],
        log=folder / f"{name}.out",
        run_dir=folder / "runs" / name,
        cwd=folder,
        path="/usr/local/bin:/usr/bin:/bin",
        home=tiny.home,
        more={"RAY_ADDRESS": cluster.address, **token()},
    )


def token() -> dict[str, str]:
    """Ray's access token, which this process created for the cluster."""
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")}
