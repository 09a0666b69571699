"""SkyPilot: one task file; SkyPilot starts the machines and runs the script on each."""

from __future__ import annotations

import dataclasses
from typing import Any

from slimrl.processes.process_info import GIB
from tools.launchers.job import Job
from tools.launchers.yaml_text import yaml_text


@dataclasses.dataclass(frozen=True)
class SkyOptions:
    """`accelerator` is SkyPilot's name of the GPU; `volume` a SkyPilot volume or bucket, mounted at the job's base."""

    accelerator: str
    infra: str | None = None
    image: str | None = None
    bucket: str | None = None
    use_spot: bool = False
    setup: str | None = None


def task(job: Job, options: SkyOptions) -> str:
    """The task file, for `sky jobs launch`, which starts again what was preempted, or `sky launch`."""
    resources: dict[str, Any] = {}
    if options.infra:
        resources["infra"] = options.infra
    resources |= {
        "accelerators": f"{options.accelerator}:{job.resources.gpus_per_node}",
        "memory": f"{-(-job.resources.memory_bytes // GIB)}+",
        "network_tier": "best",
        "use_spot": options.use_spot,
    }
    if options.image:
        resources["image_id"] = f"docker:{options.image}"
    # SkyPilot replaces preempted machines; scripts/resume.sh knows which exit codes are worth another try.
    resources["job_recovery"] = {"strategy": "FAILOVER", "max_restarts_on_errors": 0}
    document: dict[str, Any] = {"name": job.name, "num_nodes": job.resources.nodes, "resources": resources}
    document["workdir"] = "."
    secrets: dict[str, None] = {secret.variable: None for secret in job.secrets}
    if job.resources.nodes > 1:
        secrets["RAY_AUTH_TOKEN"] = None
    if secrets:
        document["secrets"] = secrets
    if options.bucket:
        document["file_mounts"] = {job.base: {"source": options.bucket, "mode": "MOUNT_CACHED"}}
    if options.setup:
        document["setup"] = options.setup
    ranks = [
        "export WORLD_SIZE=$SKYPILOT_NUM_NODES RANK=$SKYPILOT_NODE_RANK",
        'MASTER_ADDR=$(head -n 1 <<<"$SKYPILOT_NODE_IPS")',
        "export MASTER_ADDR",
        # SkyPilot runs tasks in a Ray cluster of its own.
        "unset RAY_ADDRESS",
    ]
    document["run"] = job.node_script(ranks)
    words = [f"--secret {name}" for name in secrets]
    comment = [f"{job.name}: SkyPilot task over {job.resources.nodes} x {resources['accelerators']}"]
    if "RAY_AUTH_TOKEN" in secrets:
        comment.append('   export RAY_AUTH_TOKEN="$(openssl rand -hex 32)"')
    comment.append(" ".join(["   sky jobs launch", *words, f"{job.name}.sky.yaml"]))
    return yaml_text(comment, document)
