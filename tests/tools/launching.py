"""Job files that tools/launch.py writes, checked with the schedulers' schemas, and the parts that its tests look at."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import jsonschema
import yaml

from tools import launch

SCHEMAS = {
    name: json.loads((Path(__file__).parent / "schemas" / f"{name}.json").read_text())
    for name in ("kubernetes", "skypilot")
}
DEFINITIONS = {"ConfigMap": "V1ConfigMap", "PyTorchJob": "KubeflowOrgV1PyTorchJob"}
GIB = 2**30
RECIPE = ["--", "bash", "scripts/run-glm4.7-30B-A3B.sh", "--lr", "1e-6"]
PODS = ["--image", "registry/slimrl:1", "--claim", "pvc-data", "--base", "/data"]
EVERYTHING = [
    *("--rdma", "rdma/hca", "--host-network", "--gang-scheduler", "volcano", "--queue", "research", "--cpus", "96"),
    *("--node-selector", "gpu=h100", "--env", "NCCL_DEBUG=INFO", "--secret", "WANDB_API_KEY=wandb:key"),
    *("--network-interface", "eth0", "--ib-devices", "mlx5_0,mlx5_1"),
]


def resources(nodes: int) -> list[str]:
    """Resources in place of the plan's."""
    return ["--nodes", str(nodes), "--gpus-per-node", "8", "--memory-gib", "800", "--shm-gib", "32"]


def written(scheduler: str, *options: str, nodes: int = 2, command=RECIPE) -> str:
    """The file that the tool writes."""
    parsed = launch.parser().parse_args([scheduler, *resources(nodes), *options, *command])
    return launch.WRITERS[scheduler](launch.job_of(parsed), parsed)


@functools.cache  # the schema is large, and checking it takes longer than a document
def kubernetes_validator(name: str) -> jsonschema.protocols.Validator:
    """Of one kind of document."""
    schema = {**SCHEMAS["kubernetes"], "$ref": f"#/$defs/{name}"}
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)


def check(document: dict) -> None:
    """Raises ValidationError if the document is not valid by the schema of its kind."""
    kubernetes_validator(DEFINITIONS.get(document["kind"], document["kind"])).validate(document)


def documents(text: str) -> list[dict]:
    """The documents of a Kubernetes file, each checked."""
    found = list(yaml.safe_load_all(text))
    for one in found:
        check(one)
    return found


def pods(document: dict) -> list[tuple[int, dict]]:
    """The number and the specification of the pods of each role."""
    spec = document["spec"]
    if document["kind"] == "PyTorchJob":
        return [(one["replicas"], one["template"]["spec"]) for one in spec["pytorchReplicaSpecs"].values()]
    cluster = spec.get("rayClusterSpec", spec)
    workers = [(one["replicas"], one["template"]["spec"]) for one in cluster.get("workerGroupSpecs", [])]
    return [(1, cluster["headGroupSpec"]["template"]["spec"]), *workers]


KINDS = [("kubernetes", "--kind=rayjob"), ("kubernetes", "--kind=raycluster"), ("pytorchjob",)]


def script_of_a_node(scheduler: str, project: Path, *options: str) -> tuple[str, dict[str, str]]:
    """The script that a job file gives to each node, and the variables that its scheduler sets on the second one."""
    if scheduler == "pytorchjob":
        script, _ = documents(written("pytorchjob", *PODS, "--project", str(project), *options))
        return script["data"]["launch.sh"], {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "job-master-0"}
    if scheduler == "slurm":
        text = written("slurm", "--time", "1:00:00", "--base", "/data", "--project", str(project), *options)
        (script,) = re.findall(r"<<'END_OF_NODE_SCRIPT'\n(.*)\nEND_OF_NODE_SCRIPT\n", text, re.DOTALL)
        return script, {"SLURM_PROCID": "1"}
    words = ["--accelerator", "H100", "--image", "i", "--base", "/data", "--bucket", "s3://b"]
    task = yaml.safe_load(written("skypilot", *words, *options))
    nodes = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    return task["run"], nodes
