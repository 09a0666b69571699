"""Kubernetes: RayJob and RayCluster of KubeRay, PyTorchJob of the Kubeflow training operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slimrl.processes.process_info import GIB
from tools.launchers.job import Job
from tools.launchers.yaml_text import yaml_text

SCRIPT, SCRIPT_FOLDER = "launch.sh", "/etc/slimrl"
DASHBOARD_PORT = 8265
TOKEN_KEY = "auth_token"  # the name that KubeRay gives it
# The user of docker/Dockerfile; files on the volume get this group.
USER = 1000


@dataclasses.dataclass(frozen=True)
class PodOptions:
    """What the cluster offers. `rdma` is a resource such as rdma/hca; `queue` is of Kueue or Volcano."""

    image: str
    namespace: str = "default"
    claim: str | None = None  # PersistentVolumeClaim, mounted at the job's base
    rdma: str | None = None
    node_selector: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scheduler: str = "default"  # default, volcano or kueue
    queue: str | None = None
    host_network: bool = False
    cpus: int | None = None


def pytorch_job(job: Job, options: PodOptions) -> str:
    """A ConfigMap with the script and a PyTorchJob, whose operator sets WORLD_SIZE, RANK and MASTER_ADDR."""
    nodes = job.resources.nodes
    token = f"{job.name}-ray"
    environment = [_from_secret("RAY_AUTH_TOKEN", token, TOKEN_KEY)] if nodes > 1 else []
    replicas = {"Master": _replica(job, options, environment, 1, master=True)}
    if nodes > 1:
        replicas["Worker"] = _replica(job, options, environment, nodes - 1, master=False)
    policy: dict[str, Any] = {"cleanPodPolicy": "Running", "backoffLimit": job.max_restarts}
    gang: dict[str, Any] = {"minAvailable": nodes}
    if options.queue and options.scheduler != "kueue":
        gang["queue"] = options.queue
    policy["schedulingPolicy"] = gang
    document = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(job, options, of_ray=False),
        "spec": {"runPolicy": policy, "pytorchReplicaSpecs": replicas},
    }
    comment = [f"{job.name}: PyTorchJob over {nodes} x {job.resources.gpus_per_node} GPUs", *_how_to_start(job)]
    if nodes > 1:
        comment += ["Once before it, the token of the Ray cluster between the pods:", _create_token(options, token)]
    return yaml_text(comment, _script(job, options), document)


def ray_job(job: Job, options: PodOptions) -> str:
    """A ConfigMap with the script and a RayJob. The job's program runs on the head, which is a node with GPUs."""
    address = f"http://127.0.0.1:{DASHBOARD_PORT}"
    gpus = job.resources.nodes * job.resources.gpus_per_node
    wait = f"python3 scripts/lib/wait_for_gpus.py --gpus {gpus} --timeout-s {job.join_timeout_s}"
    document = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(job, options, of_ray=True),
        "spec": {
            "entrypoint": f"bash {SCRIPT_FOLDER}/{SCRIPT}",
            "submissionMode": "K8sJobMode",
            "backoffLimit": 0,  # KubeRay would repeat any failure; scripts/resume.sh knows what is worth another try
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "rayClusterSpec": _ray_cluster(job, options),
        },
    }
    comment = [f"{job.name}: RayJob over {job.resources.nodes} x {job.resources.gpus_per_node} GPUs (KubeRay 1.5.1 on)"]
    script = _script(job, options, before_each_try=wait, rank_lines=[f"export RAY_ADDRESS={address}"])
    return yaml_text([*comment, *_how_to_start(job)], script, document)


def ray_cluster(job: Job, options: PodOptions) -> str:
    """A RayCluster without a job: the recipe is run on its head by hand."""
    document = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": _metadata(job, options, of_ray=True),
        "spec": _ray_cluster(job, options),
    }
    label = f"ray.io/cluster={job.name},ray.io/node-type=head"
    comment = [
        f"{job.name}: RayCluster of {job.resources.nodes} x {job.resources.gpus_per_node} GPUs (KubeRay 1.5.1 on)",
        *_how_to_start(job),
        "Then, as often as needed:",
        f"   pod=$(kubectl get pod -n {options.namespace} -l {label} -o name)",
        f'   kubectl exec -it -n {options.namespace} "$pod" -- bash {SCRIPT_FOLDER}/{SCRIPT}',
    ]
    script = _script(job, options, rank_lines=[f"export RAY_ADDRESS=http://127.0.0.1:{DASHBOARD_PORT}"])
    return yaml_text(comment, script, document)


def _ray_cluster(job: Job, options: PodOptions) -> dict[str, Any]:
    gpus, nodes = job.resources.gpus_per_node, job.resources.nodes
    start = {"num-gpus": str(gpus)}
    # Ray does not pass the variables of a job's script on to other nodes.
    environment = [{"name": name, "value": value} for name, value in job.variables().items()]
    ports = [
        {"name": "gcs-server", "containerPort": job.port},
        {"name": "dashboard", "containerPort": DASHBOARD_PORT},
        {"name": "client", "containerPort": 10001},
    ]
    spec: dict[str, Any] = {
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": {"dashboard-host": "0.0.0.0", "port": str(job.port), **start},
            "template": _template(job, options, environment, "ray-head", ports=ports),
        },
    }
    if nodes > 1:
        spec["workerGroupSpecs"] = [
            {
                "groupName": "nodes",
                "replicas": nodes - 1,
                "minReplicas": nodes - 1,
                "maxReplicas": nodes - 1,
                "rayStartParams": start,
                "template": _template(job, options, environment, "ray-worker"),
            }
        ]
    return spec


def _replica(
    job: Job, options: PodOptions, environment: list[dict[str, Any]], count: int, *, master: bool
) -> dict[str, Any]:
    # The operator looks for the container by this name.
    template = _template(job, options, environment, "pytorch", command=["bash", f"{SCRIPT_FOLDER}/{SCRIPT}"])
    if master and job.resources.nodes > 1:
        probe = {"tcpSocket": {"port": job.port}, "initialDelaySeconds": 10, "periodSeconds": 10}
        template["spec"]["containers"][0]["readinessProbe"] = probe
    # 128 and more (the pod was killed) is tried again, 1 to 127 is not: scripts/resume.sh has done what can be done.
    return {"replicas": count, "restartPolicy": "ExitCode", "template": template}


def _template(
    job: Job,
    options: PodOptions,
    environment: list[dict[str, Any]],
    container_name: str,
    *,
    command: list[str] | None = None,
    ports: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """The pod of one node."""
    container: dict[str, Any] = {"name": container_name, "image": options.image}
    if command:
        container["command"] = command
    if ports:
        container["ports"] = ports
    container["env"] = [*environment, *(_from_secret(one.variable, one.name, one.key) for one in job.secrets)]
    container["resources"] = _resources(job, options)
    container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    mounts, volumes = _volumes(job, options)
    container["volumeMounts"] = mounts
    spec: dict[str, Any] = {"containers": [container], "volumes": volumes, "securityContext": {"fsGroup": USER}}
    if options.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if options.node_selector:
        spec["nodeSelector"] = dict(options.node_selector)
    if options.scheduler == "volcano":
        spec["schedulerName"] = "volcano"
    spec["terminationGracePeriodSeconds"] = 90  # a run ends its processes and writes its summary
    return {"metadata": {"labels": {"app": job.name}}, "spec": spec}


def _resources(job: Job, options: PodOptions) -> dict[str, Any]:
    amounts: dict[str, Any] = {"memory": f"{-(-job.resources.memory_bytes // GIB)}Gi"}
    if options.cpus is not None:
        amounts["cpu"] = str(options.cpus)
    extended: dict[str, Any] = {"nvidia.com/gpu": job.resources.gpus_per_node}
    if options.rdma:
        extended[options.rdma] = 1
    return {"requests": {**amounts, **extended}, "limits": {"memory": amounts["memory"], **extended}}


def _volumes(job: Job, options: PodOptions) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    shared = {"medium": "Memory", "sizeLimit": f"{-(-job.resources.shared_memory_bytes // GIB)}Gi"}
    mounts: list[dict[str, Any]] = [
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        {"name": "launch", "mountPath": SCRIPT_FOLDER},
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "shared-memory", "emptyDir": shared},
        {"name": "launch", "configMap": {"name": f"{job.name}-launch"}},
    ]
    if options.claim:
        mounts.append({"name": "data", "mountPath": job.base})
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": options.claim}})
    return mounts, volumes


def _script(
    job: Job, options: PodOptions, *, before_each_try: str = "", rank_lines: tuple[str, ...] | list[str] = ()
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{job.name}-launch", "namespace": options.namespace},
        "data": {SCRIPT: job.node_script(rank_lines, before_each_try=before_each_try)},
    }


def _metadata(job: Job, options: PodOptions, *, of_ray: bool) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": job.name, "namespace": options.namespace}
    labels = {}
    if options.scheduler == "kueue":
        labels["kueue.x-k8s.io/queue-name"] = options.queue or "default"
    if options.scheduler == "volcano" and of_ray:  # a PyTorchJob names its queue in its schedulingPolicy
        labels["ray.io/scheduler-name"] = "volcano"
        if options.queue:
            labels["volcano.sh/queue-name"] = options.queue
    return {**metadata, "labels": labels} if labels else metadata


def _from_secret(variable: str, name: str, key: str) -> dict[str, Any]:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}


def _how_to_start(job: Job) -> list[str]:
    return [f"   kubectl apply -f {job.name}.yaml"]


def _create_token(options: PodOptions, name: str) -> str:
    command = f'kubectl create secret generic {name} --from-literal={TOKEN_KEY}="$(openssl rand -hex 32)"'
    return f"   {command} -n {options.namespace}"
