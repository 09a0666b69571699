"""A run on a Ray cluster of four nodes: a group with an engine over two of them, and one with an engine of one GPU."""

import sys
from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster

from tests.end_to_end import harness
from tests.end_to_end.harness import ROOT
from tests.end_to_end.ray_nodes import NODE, empty_cluster, token

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
GROUPS = """sglang:
  - name: actor
    server_groups:
      - {worker_type: regular, num_gpus: 2, num_gpus_per_engine: 2}
      - {worker_type: regular, num_gpus: 1, num_gpus_per_engine: 1, overrides: {max_running_requests: 16}}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Four Ray nodes with one GPU each."""
    with empty_cluster() as (made, folder):
        for _ in range(4):
            made.add_node(**NODE, temp_dir=folder)
        yield made


def test_group_with_an_engine_over_two_nodes_gets_every_update_beside_one_of_a_single_gpu(cluster, tiny, tmp_path):
    (tmp_path / "groups.yaml").write_text(GROUPS)
    gpus = {"actor_num_gpus_per_node": 1, "num_gpus_per_node": 1, "rollout_num_gpus": 3}
    flags = tiny.flags(sglang_config=tmp_path / "groups.yaml", check_weight_update_equal=True, num_rollout=3, **gpus)
    started = harness.launch(
        [sys.executable, str(ROOT / "train.py"), *flags, "--run-name", "groups"],
        log=tmp_path / "groups.out",
        run_dir=tmp_path / "runs" / "groups",
        cwd=tmp_path,
        path="/usr/local/bin:/usr/bin:/bin",
        home=tiny.home,
        more={"RAY_ADDRESS": cluster.address, **token()},
    )
    done = started.finish(240)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    assert "the weights of every engine equal the trained ones, bit for bit" in done.output
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-4
    assert done.steps("weight_version") == ["0", "1", "2"]
    logs = {path.name for path in (done.run_dir / "logs").iterdir()}
    assert {"sglang0.log", "sglang0.node1.log", "sglang1.log"} <= logs and "sglang1.node1.log" not in logs
    for name, size in (("sglang0.log", 2), ("sglang1.log", 1)):
        text = (done.run_dir / "logs" / name).read_text()
        assert f"'tp_size': {size}," in text and "POST /generate" in text  # each served requests
