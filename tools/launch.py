#!/usr/bin/env python3
"""Turn a recipe into a job file of a cluster scheduler.

    python tools/launch.py kubernetes --image IMAGE --claim pvc-data --base /data -- bash scripts/run-qwen3-4B.sh
    python tools/launch.py pytorchjob --image IMAGE --claim pvc-data --base /data -- bash scripts/run-glm4.7-30B-A3B.sh
    python tools/launch.py slurm --time 1-00:00:00 --partition gpu --base /data -- bash scripts/run-qwen3-4B.sh --async
    python tools/launch.py skypilot --accelerator H100 --base /data -- bash scripts/run-qwen3-4B.sh

Nodes, GPUs and memory are those of the recipe's plan (its --dry-run), so that flags are checked now and not in the
queue. The file goes to standard output or to --output. Exit code 0, or 2 with all errors. docs/launchers.md explains
the files.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from slimrl.arguments.dry_run import NodeResources
from tools.launchers import kubernetes, skypilot, slurm
from tools.launchers.job import Job, LaunchError, Secret, planned_resources

NAME = Path(__file__).name
GIB = 2**30
EXIT_REFUSED = 2
# In a pod of docker/Dockerfile.
IMAGE_PROJECT = "/opt/slimrl"
REPLACING_THE_PLAN = ("nodes", "gpus_per_node", "memory_gib", "shm_gib")


def pair(text: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(text)
    return name, value


def secret(text: str) -> Secret:
    """VARIABLE, or VARIABLE=SECRET:KEY."""
    variable, _, place = text.partition("=")
    name, _, key = place.partition(":")
    if bool(name) != bool(key):
        raise ValueError(text)
    return Secret(variable, name, key)


def parser() -> argparse.ArgumentParser:
    """The options of all schedulers and of each."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    schedulers = top.add_subparsers(dest="scheduler", required=True, metavar="SCHEDULER")
    common = _common_options()
    for name, about, add in (
        ("kubernetes", "RayJob or RayCluster of the KubeRay operator", _ray_options),
        ("pytorchjob", "PyTorchJob of the Kubeflow training operator", _pod_options),
        ("slurm", "sbatch file", _slurm_options),
        ("skypilot", "SkyPilot task file", _sky_options),
    ):
        one = schedulers.add_parser(name, help=about, description=about, parents=[common], allow_abbrev=False)
        add(one)
        one.add_argument("command", nargs="+", help="after --: the recipe with its arguments")
    return top


def _common_options() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add = common.add_argument
    add("--name", help="name of the job (default: the recipe's, without run-)")
    add("--output", type=Path, help="file to write (default: standard output)")
    add("--base", default="/root", help="BASE on the nodes: models, data, checkpoints; shared by all (default: /root)")
    add(
        "--project",
        help="the checkout on the nodes (default: the image's; Slurm: this one; SkyPilot: its own)",
    )
    add("--runs-dir", help="folder of the run folders (default: BASE/runs)")
    add("--activate", help="script to source on each node, such as .venv-gpu/bin/activate (default: none)")
    add("--env", type=pair, action="append", default=[], metavar="NAME=VALUE", help="environment variable")
    add(
        *("--secret",),
        type=secret,
        action="append",
        default=[],
        metavar="NAME[=SECRET:KEY]",
        help="environment variable from a secret: a Kubernetes secret and its key; for SkyPilot the name alone",
    )
    add("--network-interface", help="of the nodes' addresses, for NCCL and gloo (default: slimrl finds it)")
    add("--ib-devices", help="InfiniBand or RoCE adapters for NCCL_IB_HCA, e.g. mlx5_0,mlx5_1")
    add("--port", type=int, default=6379, help="of the Ray head (default: 6379)")
    add("--max-restarts", type=int, default=10, help="of a run that was lost (default: 10)")
    add("--rejoin-timeout-s", type=int, help="wait of the other nodes for another try (default: 180; Kubernetes: 1800)")
    add("--tensorboard-variable", default="AIHC_TENSORBOARD_LOG_PATH", help="variable with the path of TensorBoard")
    add("--gpu-memory-gib", type=float, help="memory of one GPU, for the plan's check")
    add("--nodes", type=int, help="instead of the plan's; also the next three")
    add("--gpus-per-node", type=int, help="GPUs of a node")
    add("--memory-gib", type=int, help="host memory of a node, with /dev/shm")
    add("--shm-gib", type=int, help="size of /dev/shm")
    return common


def _pod_options(one: argparse.ArgumentParser) -> None:
    add = one.add_argument
    add("--image", required=True, help="image with slimrl (docker/Dockerfile)")
    add("--namespace", default="default", help="(default: default)")
    add("--claim", help="PersistentVolumeClaim, mounted at BASE")
    add("--rdma", metavar="RESOURCE", help="resource of the network adapter, e.g. rdma/hca")
    add("--node-selector", type=pair, action="append", default=[], metavar="LABEL=VALUE", help="of the nodes")
    add("--gang-scheduler", choices=("default", "volcano", "kueue"), default="default", help="(default: default)")
    add("--queue", help="queue of volcano or kueue")
    add("--host-network", action="store_true", help="use the network of the host")
    add("--cpus", type=int, help="CPU cores of a node (default: not requested)")


def _ray_options(one: argparse.ArgumentParser) -> None:
    _pod_options(one)
    one.add_argument("--kind", choices=("rayjob", "raycluster"), default="rayjob", help="(default: rayjob)")


def _slurm_options(one: argparse.ArgumentParser) -> None:
    add = one.add_argument
    add("--time", required=True, help="time limit of one allocation, D-HH:MM:SS; the job is queued again after it")
    add("--partition", help="of Slurm")
    add("--account", help="of Slurm")
    add("--cpus", type=int, help="CPU cores of a node (default: whole nodes, --exclusive)")
    add("--gpus-as", choices=("gpus-per-node", "gres"), default="gpus-per-node", help="(default: gpus-per-node)")
    add("--image", help="image for pyxis (srun --container-image)")
    add("--sbatch", action="append", default=[], metavar="WORD", help="further #SBATCH word, e.g. --sbatch=--qos=high")


def _sky_options(one: argparse.ArgumentParser) -> None:
    add = one.add_argument
    add("--accelerator", required=True, help="SkyPilot's name of the GPU, e.g. H100")
    add("--infra", help="cloud, region or Kubernetes context (default: the cheapest)")
    add("--image", help="docker image (default: SkyPilot's, with --setup)")
    add("--bucket", metavar="URI", help="bucket mounted at BASE, e.g. s3://my-data")
    add("--use-spot", action="store_true", help="preemptible machines")
    add("--setup", help="command that installs slimrl on a machine without --image")


def resources_of(options: argparse.Namespace, command: Sequence[str]) -> NodeResources:
    """From the four options, else from the plan. Raises LaunchError."""
    given = [getattr(options, name) for name in REPLACING_THE_PLAN]
    if any(value is not None and value < 1 for value in given):
        raise LaunchError("--nodes, --gpus-per-node, --memory-gib and --shm-gib are at least 1.")
    if None not in given:
        nodes, gpus, memory, shared = given
        return NodeResources(nodes, gpus, memory * GIB, shared * GIB)
    if any(value is not None for value in given):
        raise LaunchError("--nodes, --gpus-per-node, --memory-gib and --shm-gib replace the plan: give all four.")
    return planned_resources(command, options.base, options.gpu_memory_gib)


def _misplaced(options: argparse.Namespace) -> Iterator[str]:
    """Options that this scheduler would ignore, and storage without which a restart begins anew."""
    scheduler = options.scheduler
    if scheduler in ("kubernetes", "pytorchjob"):
        if not options.claim:
            yield "--claim: checkpoints must survive a pod: give the PersistentVolumeClaim of BASE."
        if options.queue and options.gang_scheduler == "default":
            yield f"--queue {options.queue} is of volcano or kueue: give --gang-scheduler."
        for one in options.secret:
            if not one.name:
                yield f"--secret {one.variable}: give the Kubernetes secret and its key, {one.variable}=SECRET:KEY."
    if scheduler == "kubernetes":
        for flag, value in (("--project", options.project), ("--activate", options.activate)):
            if value is not None:
                yield f"{flag} {value}: the job's program runs with the folder and PATH of the image: leave it out."
    if scheduler == "skypilot" and not options.bucket:
        yield "--bucket: checkpoints must survive a machine: give the bucket of BASE."
    if scheduler == "slurm":
        for one in options.secret:
            yield (
                f"--secret {one.variable}: Slurm has no secrets; sbatch passes your environment on: export"
                f" {one.variable} before sbatch."
            )


def job_of(options: argparse.Namespace) -> Job:
    """The job of the options. Raises LaunchError."""
    command = list(options.command)
    recipe = next((word for word in command if word.endswith(".sh")), None)
    if recipe is None:
        raise LaunchError(f"{' '.join(command)}: no recipe: give bash scripts/run-....sh after --.")
    if "--tiny" in command:
        raise LaunchError("--tiny: runs on this machine's CPU; leave it out.")
    if problems := list(_misplaced(options)):
        raise LaunchError("\n".join(problems))
    resources = resources_of(options, command)
    name = options.name or Path(recipe).stem.removeprefix("run-").lower().replace(".", "-").replace("_", "-")
    if not any(word.split("=")[0] == "--runs-dir" for word in command):
        command += ["--runs-dir", options.runs_dir or f"{options.base.rstrip('/')}/runs"]
    on_image = options.scheduler in ("kubernetes", "pytorchjob") or (options.scheduler == "slurm" and options.image)
    replaces_pods = options.scheduler in ("kubernetes", "pytorchjob")
    own = None if options.scheduler == "skypilot" else str(Path(__file__).resolve().parents[1])
    return Job(
        name=name,
        command=tuple(command),
        resources=resources,
        project=options.project or (IMAGE_PROJECT if on_image else own),
        base=options.base,
        environment=dict(options.env),
        secrets=tuple(options.secret),
        activate=options.activate,
        port=options.port,
        max_restarts=options.max_restarts,
        # Kubernetes replaces single pods, which may take long.
        rejoin_timeout_s=(1800 if replaces_pods else 180)
        if options.rejoin_timeout_s is None
        else options.rejoin_timeout_s,
        network_interface=options.network_interface,
        ib_devices=options.ib_devices,
        tensorboard_variable=options.tensorboard_variable,
    )


def _pods(options: argparse.Namespace) -> kubernetes.PodOptions:
    return kubernetes.PodOptions(
        image=options.image,
        namespace=options.namespace,
        claim=options.claim,
        rdma=options.rdma,
        node_selector=dict(options.node_selector),
        scheduler=options.gang_scheduler,
        queue=options.queue,
        host_network=options.host_network,
        cpus=options.cpus,
    )


def _ray(job: Job, options: argparse.Namespace) -> str:
    write = kubernetes.ray_job if options.kind == "rayjob" else kubernetes.ray_cluster
    return write(job, _pods(options))


def _pytorch(job: Job, options: argparse.Namespace) -> str:
    return kubernetes.pytorch_job(job, _pods(options))


def _slurm(job: Job, options: argparse.Namespace) -> str:
    return slurm.sbatch(
        job,
        slurm.SlurmOptions(
            time=options.time,
            partition=options.partition,
            account=options.account,
            cpus=options.cpus,
            gpus_as=options.gpus_as,
            container=options.image,
            mounts_project=options.project is not None,
            extra=tuple(options.sbatch),
        ),
    )


def _sky(job: Job, options: argparse.Namespace) -> str:
    if bool(options.image) == bool(options.setup):
        raise LaunchError("give either --image with slimrl, or --setup with the command that installs it.")
    return skypilot.task(
        job,
        skypilot.SkyOptions(
            accelerator=options.accelerator,
            infra=options.infra,
            image=options.image,
            bucket=options.bucket,
            use_spot=options.use_spot,
            setup=options.setup,
        ),
    )


WRITERS: dict[str, Callable[[Job, argparse.Namespace], str]] = {
    "kubernetes": _ray,
    "pytorchjob": _pytorch,
    "slurm": _slurm,
    "skypilot": _sky,
}


def main(argv: list[str]) -> int:
    """Writes the file; returns the exit code."""
    options = parser().parse_args(argv)
    try:
        text = WRITERS[options.scheduler](job_of(options), options)
        if options.output is None:
            sys.stdout.write(text)
        else:
            options.output.write_text(text, encoding="utf-8")
    except (LaunchError, OSError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
