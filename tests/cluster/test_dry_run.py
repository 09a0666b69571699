"""How the dry run queries a Ray cluster."""

import subprocess
import sys
import time

import pytest
import ray

from slimrl.arguments.layout import placement
from slimrl.cluster.command_line import ClusterAbsentError, gpus_of_nodes
from slimrl.cluster.placement import plan_gpus
from slimrl.cluster.ray_session import ray_session
from tests.arguments.dry_run.published import QWEN3_4B, flags
from tests.megatron.launch import free_port


def test_no_cluster_is_queried_when_none_runs():
    assert gpus_of_nodes(None) is None


def test_unresponsive_cluster_is_reported_without_delay():
    started = time.perf_counter()
    with pytest.raises(ClusterAbsentError, match="RAY_ADDRESS=127.0.0.1:.* does not answer"):
        gpus_of_nodes(f"127.0.0.1:{free_port()}")
    assert time.perf_counter() - started < 15  # 3 s at most; Ray itself would try for minutes


@pytest.mark.parametrize(
    "changes",
    [
        dict(actor_num_gpus_per_node=2, rollout_num_gpus=6),
        dict(colocate=True),
        dict(rollout_num_gpus=4, debug_train_only=True),
        dict(rollout_num_gpus=4, debug_rollout_only=True),
    ],
)
def test_plan_reserves_the_same_gpus_as_the_run(changes):
    args = flags(QWEN3_4B, rollout_num_gpus_per_engine=2, **changes)
    planned, reserved = placement(args, None), plan_gpus(args)
    assert (planned.total, planned.train) == (reserved.total, reserved.train)
    assert [gpu for engine in planned.engines for gpu in engine] == list(reserved.rollout)


@pytest.mark.slow
def test_running_cluster_reports_the_gpus_of_its_nodes():
    with ray_session(3):
        address = ray.get_runtime_context().gcs_address
        program = f"from slimrl.cluster.command_line import gpus_of_nodes; print(gpus_of_nodes('{address}'))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[3]", done.stderr
