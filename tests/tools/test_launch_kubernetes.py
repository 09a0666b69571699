"""RayJob, RayCluster and PyTorchJob of tools/launch.py: valid by their schemas, with what pods and schedulers need."""

from __future__ import annotations

import re

import jsonschema
import pytest

from tests.tools.launching import EVERYTHING, KINDS, PODS, check, documents, pods, written


@pytest.mark.parametrize("nodes", [1, 2, 16])
@pytest.mark.parametrize("more", [[], EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("kind", KINDS, ids=["rayjob", "raycluster", "pytorchjob"])
def test_kubernetes_file_has_a_pod_with_the_resources_of_each_node(kind, more, nodes):
    scheduler, *options = kind
    script, document = documents(written(scheduler, *options, *PODS, *more, nodes=nodes))
    assert sum(number for number, _ in pods(document)) == nodes
    for _, pod in pods(document):
        (container,) = pod["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        assert container["resources"]["limits"]["memory"] == "800Gi"
        volumes = {one["name"]: one for one in pod["volumes"]}
        paths = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
        assert paths["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Gi"}
        assert paths["/data"]["persistentVolumeClaim"]["claimName"] == "pvc-data"
        assert paths["/etc/slimrl"]["configMap"]["name"] == script["metadata"]["name"]
        assert ("IPC_LOCK" in container["securityContext"]["capabilities"]["add"]) is True
        if more:
            assert container["resources"]["limits"]["rdma/hca"] == 1
            assert pod["hostNetwork"] and pod["dnsPolicy"] == "ClusterFirstWithHostNet"


# fields that the files have, for values of another type; the other fields are unknown
EXISTING = {"backoffLimit", "submissionMode", "mode", "num-gpus", "minReplicas", "cleanPodPolicy", "restartPolicy"}
HEAD, WORKERS = "rayClusterSpec.headGroupSpec", "rayClusterSpec.workerGroupSpecs.0"


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (KINDS[0], "retries", 3),
        (KINDS[0], "deletionPolicy", "DeleteCluster"),  # of KubeRay 1.3, since replaced
        (KINDS[0], "backoffLimit", "0"),
        (KINDS[0], "submissionMode", "Job"),
        (KINDS[0], "rayClusterSpec.authOptions.token", "secret"),
        (KINDS[0], "rayClusterSpec.authOptions.mode", "password"),
        (KINDS[0], f"{HEAD}.replicas", 1),
        (KINDS[0], f"{HEAD}.rayStartParams.num-gpus", 8),
        (KINDS[0], f"{HEAD}.template.spec.containers.0.gpu", 8),
        (KINDS[0], f"{WORKERS}.count", 1),
        (KINDS[1], "entrypoint", "bash launch.sh"),  # a RayCluster runs no job
        (KINDS[1], "workerGroupSpecs.0.minReplicas", "1"),
        (KINDS[2], "runPolicy.restarts", 3),
        (KINDS[2], "runPolicy.cleanPodPolicy", "Finished"),
        (KINDS[2], "pytorchReplicaSpecs.Worker.restartPolicy", "Once"),
        (KINDS[2], "pytorchReplicaSpecs.Master.template.spec.hostnetwork", True),
    ],
)
def test_schemas_refuse_what_the_operators_do_not_know(kind, field, value):
    *_, document = documents(written(*kind, *PODS))
    *path, name = field.split(".")
    part = document["spec"]
    for key in path:
        part = part[int(key) if isinstance(part, list) else key]
    part[name] = value
    with pytest.raises(jsonschema.ValidationError, match=re.escape(repr(value if name in EXISTING else name))):
        check(document)


@pytest.mark.parametrize("kind", KINDS, ids=["rayjob", "raycluster", "pytorchjob"])
def test_secrets_are_references_and_never_values(kind):
    scheduler, *options = kind
    _, document = documents(written(scheduler, *options, *PODS, *EVERYTHING))
    for _, pod in pods(document):
        entries = {one["name"]: one for one in pod["containers"][0]["env"]}
        assert entries["WANDB_API_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "wandb", "key": "key"}
        assert "value" not in entries["WANDB_API_KEY"]
        if scheduler == "pytorchjob":
            assert entries["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["key"] == "auth_token"


def test_ray_of_kuberay_has_a_token():
    _, document = documents(written("kubernetes", *PODS, *EVERYTHING))
    assert document["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}


# The labels by which KubeRay and Kueue know a job, as their documentation of Volcano and of each kind of job has them,
# and what Volcano and the training operator read in a pod and a gang.
OF_VOLCANO, QUEUE_OF_VOLCANO, OF_KUEUE = "ray.io/scheduler-name", "volcano.sh/queue-name", "kueue.x-k8s.io/queue-name"
VOLCANO, KUEUE = ["--gang-scheduler", "volcano"], ["--gang-scheduler", "kueue"]
QUEUE = ["--queue", "research"]


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("kind", KINDS[:2], ids=["rayjob", "raycluster"])
@pytest.mark.parametrize(
    ("options", "labels", "scheduler"),
    [
        ([], {}, None),
        (VOLCANO, {OF_VOLCANO: "volcano"}, "volcano"),
        ([*VOLCANO, *QUEUE], {OF_VOLCANO: "volcano", QUEUE_OF_VOLCANO: "research"}, "volcano"),
        (KUEUE, {OF_KUEUE: "default"}, None),
        ([*KUEUE, *QUEUE], {OF_KUEUE: "research"}, None),
    ],
)
def test_gang_scheduler_finds_a_ray_cluster_by_its_labels(options, labels, scheduler, kind, nodes):
    _, document = documents(written(*kind, *PODS, *options, nodes=nodes))
    assert document["metadata"].get("labels", {}) == labels
    assert {pod.get("schedulerName") for _, pod in pods(document)} == {scheduler}
    cluster = document["spec"].get("rayClusterSpec", document["spec"])
    # the gang is the head and the least number of each group
    assert 1 + sum(group["minReplicas"] for group in cluster.get("workerGroupSpecs", [])) == nodes


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize(
    ("options", "labels", "scheduler", "queue"),
    [
        ([], {}, None, {}),
        (VOLCANO, {}, "volcano", {}),
        ([*VOLCANO, *QUEUE], {}, "volcano", {"queue": "research"}),
        (KUEUE, {OF_KUEUE: "default"}, None, {}),
        ([*KUEUE, *QUEUE], {OF_KUEUE: "research"}, None, {}),
    ],
)
def test_gang_of_a_pytorch_job_has_the_size_and_the_queue_of_its_scheduler(options, labels, scheduler, queue, nodes):
    _, document = documents(written("pytorchjob", *PODS, *options, nodes=nodes))
    assert document["metadata"].get("labels", {}) == labels
    assert {pod.get("schedulerName") for _, pod in pods(document)} == {scheduler}
    assert document["spec"]["runPolicy"]["schedulingPolicy"] == {"minAvailable": nodes, **queue}


def test_pytorch_job_retries_only_killed_pods_and_its_master_says_when_it_is_ready():
    _, document = documents(written("pytorchjob", *PODS))
    roles = document["spec"]["pytorchReplicaSpecs"]
    assert {one["restartPolicy"] for one in roles.values()} == {"ExitCode"}
    (probed,) = [name for name, one in roles.items() if "readinessProbe" in one["template"]["spec"]["containers"][0]]
    assert probed == "Master"
