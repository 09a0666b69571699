"""A node joins a running job, its engine gets the run's weights and serves, and the node is lost again."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.end_to_end import faults, harness
from tests.end_to_end.harness import ROOT
from tests.end_to_end.test_over_nodes import token

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEPS = 120
NODE = {"num_cpus": 2, "object_store_memory": 100_000_000, "include_dashboard": False}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """One Ray node with two GPUs; the test adds another."""
    with (
        tempfile.TemporaryDirectory(prefix="slimrl-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", folder)  # where Cluster writes its address, without creating the folder
        (Path(folder) / "ray").mkdir()
        cluster = Cluster()
        try:
            cluster.add_node(**NODE, num_gpus=2, temp_dir=folder)
            yield cluster
        finally:
            cluster.shutdown()


def test_engine_on_a_node_that_joins_gets_the_weights_and_its_loss_loses_no_sample(cluster, tiny, tmp_path):
    dumps = tmp_path / "dumps" / "{rollout_id}.jsonl"
    flags = tiny.flags(
        actor_num_gpus_per_node=1,
        rollout_num_gpus=1,
        rollout_max_num_gpus=2,
        num_gpus_per_node=2,
        num_rollout=STEPS,
        rollout_shuffle=None,
        sglang_max_running_requests=2,
        use_fault_tolerance=True,
        rollout_health_check_interval=0.5,
        rollout_health_check_timeout=20,
        save_debug_rollout_data=dumps,
    )
    started = harness.launch(
        [sys.executable, str(ROOT / "train.py"), *flags, "--run-name", "elastic"],
        log=tmp_path / "elastic.out",
        run_dir=tmp_path / "runs" / "elastic",
        cwd=tmp_path,
        path="/usr/local/bin:/usr/bin:/bin",
        home=tiny.home,
        more={"RAY_ADDRESS": cluster.address, **token()},
    )
    started.wait_for_line("step 1 |", 150)
    spot = cluster.add_node(**NODE, num_gpus=1, temp_dir=cluster.head_node.get_temp_dir_path())
    started.wait_for_line("SGLang server 1 ", 120)  # "joined and waits for weights"
    started.wait_for_line("and serves", 120)
    served = started.log.read_text().count("step ")
    deadline = time.monotonic() + 120
    while started.log.read_text().count("step ") < served + 4:
        assert started.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    cluster.remove_node(spot, allow_graceful=False)
    done = started.finish(240)
    print("\n".join(["", *faults.fault_lines(done.output)]))
    assert done.code == 0, done.output[-6000:]
    assert "its GPUs are returned to Ray" in done.output

    prompts = [
        json.loads(line)["prompt"][0]["content"] for line in (tiny.folder / "train.jsonl").read_text().splitlines()
    ]
    recorded = faults.rollouts(dumps, STEPS)
    assert [len(samples) for samples in recorded] == [32] * STEPS
    faults.assert_accounts(recorded, prompts, group_size=4)
    for step, samples in enumerate(recorded):  # an engine that served with its initial weights would have "default"
        assert {version for sample in samples for version in sample.weight_versions} == {str(step)}
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-3
    counted = {name: sum(done.steps(f"rollout/faults/servers_{name}")) for name in ("lost", "replaced", "joined")}
    assert counted == {"lost": 1, "replaced": 0, "joined": 1}
    logs = {path.name for path in (done.run_dir / "logs").iterdir()}
    assert {"sglang0.log", "sglang1.log"} <= logs
