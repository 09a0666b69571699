"""A full colocated run on a Ray cluster of two nodes: training over both, and one engine over both."""

import sys
from collections.abc import Iterator

import psutil
import pytest
from ray.cluster_utils import Cluster

from tests.end_to_end import harness
from tests.end_to_end.harness import ROOT
from tests.end_to_end.ray_nodes import NODE, empty_cluster, token
from tests.machines import why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
NODES = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 1, "num_gpus_per_node": 1, "rollout_num_gpus_per_engine": 2}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two Ray nodes with one GPU each."""
    with empty_cluster() as (made, folder):
        for _ in range(2):
            made.add_node(**NODE, temp_dir=folder)
        yield made


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        pytest.param(
            "tensor",  # each tensor is sharded over the nodes
            {"check_weight_update_equal": True},
            marks=pytest.mark.skipif(not why_not(), reason="test_machines.py runs it over machines of their own"),
        ),
        ("stages", {"sglang_pp_size": 2}),  # a pipeline stage on each node
    ],
)
def test_run_trains_and_generates_over_two_nodes(name, flags, cluster, tiny, tmp_path):
    command = [sys.executable, str(ROOT / "train.py"), *tiny.flags(colocate=True, num_rollout=2, **NODES, **flags)]
    started = harness.launch(
        [*command, "--run-name", name],
        log=tmp_path / f"{name}.out",
        run_dir=tmp_path / "runs" / name,
        cwd=tmp_path,
        path="/usr/local/bin:/usr/bin:/bin",
        home=tiny.home,
        more={"RAY_ADDRESS": cluster.address, **token()},
    )
    done = started.finish(240)
    assert done.code == 0, done.output
    assert done.left == []
    # samples of both weight versions match the trainer's log-probabilities: each weight update reached every part of
    # the engine
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-4
    assert done.steps("weight_version") == ["0", "1"]
    logs = {path.name for path in (done.run_dir / "logs").iterdir()}
    assert {"sglang0.log", "sglang0.node1.log", "engine0.log", "engine0.node1.log"} <= logs
    model = f"--model-path={tiny.model}"
    assert not [process for process in psutil.process_iter(["cmdline"]) if model in (process.info["cmdline"] or [])]
