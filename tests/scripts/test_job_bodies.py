"""What SkyPilot and the Kubeflow training operator run on every node, on two machines with the variables of each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from tests.end_to_end import harness
from tests.end_to_end.nodes import PATH
from tests.machines import ADDRESSES, Machines, two_machines, why_not
from tests.scripts.launched_jobs import FAILS_ONCE, RAY_ERRORS, ROOT, job_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=f"two machines: {why_not()}"),
    pytest.mark.timeout(300),
]
TOKEN = os.urandom(32).hex()


def of_skypilot(folder: Path, rank: int) -> tuple[str, dict[str, str]]:
    """What SkyPilot runs on a machine, and the variables that it sets there."""
    options = ["--accelerator", "H100", "--image", "i", "--bucket", "s3://b"]
    task = yaml.safe_load(job_file(folder, FAILS_ONCE, "skypilot", *options))
    variables = {
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "\n".join(ADDRESSES[: task["num_nodes"]]),
        "RAY_ADDRESS": "127.0.0.1:6380",  # of SkyPilot's own cluster
    }
    return task["run"], variables


def of_the_training_operator(folder: Path, rank: int) -> tuple[str, dict[str, str]]:
    """What a pod of a PyTorchJob runs, and the variables that the operator sets there."""
    options = ["--image", "i", "--claim", "c", "--project", str(ROOT)]
    config_map, job = yaml.safe_load_all(job_file(folder, FAILS_ONCE, "pytorchjob", *options))
    roles = job["spec"]["pytorchReplicaSpecs"]
    variables = {
        "WORLD_SIZE": str(sum(role["replicas"] for role in roles.values())),
        "RANK": str(rank),
        "MASTER_ADDR": f"{job['metadata']['name']}-master-0",  # the service in front of the pod
        "MASTER_PORT": "23456",
        "PYTHONUNBUFFERED": "1",
    }
    hosts = folder / f"hosts{rank}"
    hosts.write_text(hosts.read_text() + f"{ADDRESSES[0]} {variables['MASTER_ADDR']}\n")
    return config_map["data"]["launch.sh"], variables


def start(machines: Machines, folder: Path, rank: int, script: str, variables: dict[str, str]) -> harness.Started:
    file = folder / f"node{rank}.sh"
    file.write_text(script)
    return harness.launch(
        machines.command(rank, "bash", str(file)),
        log=folder / f"node{rank}.out",
        run_dir=folder,
        cwd=ROOT,
        path=PATH,
        home=folder,
        more={"RAY_AUTH_TOKEN": TOKEN, **variables},
        own_shared_memory=True,
    )


@pytest.mark.parametrize("body", [of_skypilot, of_the_training_operator])
def test_lost_run_starts_again_on_both_machines_and_both_end_well_at_once(body, tmp_path):
    with two_machines(tmp_path) as machines:
        nodes = [start(machines, tmp_path, rank, *body(tmp_path, rank)) for rank in range(2)]
        head, second = [node.finish(limit) for node, limit in zip(nodes, (200, 40), strict=True)]
        assert (head.code, second.code) == (0, 0), head.output + second.output
        assert head.output.count("GPUs 2.0 nodes 2") == 2, head.output
        assert "exit code 75: restart 1 of at most 10" in head.output
        assert "node 1 joins again in case the head starts another try" in second.output
        assert "node 1 ends: the run has ended" in second.output  # without --rejoin-timeout-s
        assert not RAY_ERRORS.search(head.output + second.output), head.output + second.output
        assert (head.left, second.left) == ([], [])
