"""Environment variables of a run's processes: thread counts, NCCL settings, Ray's access token, compiled kernels.

A decision that differs between GPU and CPU nodes is a pure function of a `Machine` (a node, as data), the run's flags
and the inherited variables, so that tests on a CPU cover the decisions for GPUs. Only `this_machine`, `network_of` and
`usable_cores` query torch and the operating system. The decisions for SGLang servers are in
`slimrl.engines.sglang.server`. `prepare_ray_environment` is for this process, before it imports Ray.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimrl.processes.files import make_private

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Network:
    """How other nodes reach this one: its address in Ray, and the interface with that address; "" if unknown."""

    address: str = ""
    interface: str = ""


@dataclasses.dataclass(frozen=True)
class Machine:
    """One node. `gpus` and `cores` are the usable numbers; `nccl` is the version of torch's NCCL."""

    cuda: bool
    gpus: int = 0
    cores: int = 1
    nccl: tuple[int, ...] = ()
    network: Network = Network()


def this_machine() -> Machine:
    """The node of this process, as torch and the installed packages describe it."""
    if (
        os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    ):  # hides every GPU from torch, whose import takes more than a second
        return Machine(cuda=False, gpus=0, cores=usable_cores())
    import torch  # here, because an actor that only starts a rank must not import torch

    cuda = torch.cuda.is_available()
    return Machine(
        cuda=cuda,
        gpus=torch.cuda.device_count() if cuda else 0,
        cores=usable_cores(),
        nccl=tuple(torch.cuda.nccl.version()) if cuda else (),
    )


def network_of(address: str) -> Network:
    """The network of this node, whose address is `address`; without an interface if none has that address."""
    import psutil  # here, because modules that only use the data classes must not need it

    for interface, held in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in held):
            return Network(address, interface)
    return Network(address)


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


# Ray would kill the children of an actor that ends, including the subreapers that clean up after servers and ranks. It
# reads the variable when a process of it starts.
KEEP_SUBREAPERS = {"RAY_kill_child_processes_on_worker_exit": "0"}
_ON_CPU = {
    # Several ranks and servers share one machine's cores: one thread each is faster than contention.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# --deterministic-mode: torch and Transformer Engine require the first two; NCCL's order of additions depends on its
# algorithm, which it would choose by size and topology
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
}
# SGLang (from 0.5.20 on) sets them in servers with deterministic inference and tensor parallelism. NCCL applies them
# after the members of a group have agreed on their channels, so that ranks in a group with such servers need them, too.
CHANNELS = {"NCCL_MIN_NCHANNELS": "8", "NCCL_MAX_NCHANNELS": "8"}
CUMEM = "NCCL_CUMEM_ENABLE"
# Of groups with servers: NCCL's watchdog ends a rank at its group's limit, later than ours, which names the server.
NCCL_GRACE = datetime.timedelta(seconds=60)
SUSPENDS_SINCE = (2, 29, 7)  # the first NCCL with ncclCommSuspend


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """The facts of a run that affect how its processes are started.

    `broadcasts_weights`: trainer rank 0 and the engines share an NCCL group for weight updates.
    `shares_gpus`: trainers and engines are colocated. `suspends_nccl`: --offload-train-nccl.
    `symmetric_memory`: --sglang-enable-symm-mem. `deterministic`: --deterministic-mode. `deterministic_engines`:
    --sglang-enable-deterministic-inference.
    """

    broadcasts_weights: bool = False
    shares_gpus: bool = False
    offloads_training: bool = False
    suspends_nccl: bool = True
    megatron_fsdp: bool = False
    symmetric_memory: bool = False
    deterministic: bool = False
    deterministic_engines: bool = False


def actor_environment(machine: Machine, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of every Ray actor; `inherited` are the driver's variables, which on a CPU win over defaults.

    If the driver's node has no GPU, GPUs are hidden from the workers, even on logical GPUs that Ray numbers.
    """
    if machine.cuda:
        return dict(KEEP_SUBREAPERS)
    defaults = {name: inherited.get(name, value) for name, value in _ON_CPU.items()}
    return {**defaults, **KEEP_SUBREAPERS, "CUDA_VISIBLE_DEVICES": ""}


def of_driver(environment: Mapping[str, str]) -> dict[str, str]:
    """The driver's variables that win over those of a rank's node; Ray does not pass them on.

    Ignores OMP_NUM_THREADS=1, which Ray sets in a driver that is a Ray job.
    """
    names = ("OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS")
    chosen = {name: environment[name] for name in names if name in environment}
    return {name: value for name, value in chosen.items() if (name, value) != ("OMP_NUM_THREADS", "1")}


def rank_environment(
    machine: Machine,
    run: RunFacts,
    *,
    gpu: int | str,
    nccl: Mapping[str, str],
    given: Mapping[str, str],
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """The variables of a training rank's process in addition to its actor's.

    `inherited` are the actor's variables, overridden by the driver's (`of_driver`). `nccl` is the run's
    `nccl_environment`. `gpu` is the number (or UUID) of its GPU on its node, from the placement: Ray hides other GPUs
    only if RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is unset. `given` are --train-env-vars, which win.
    """
    network = network_environment(machine.network, inherited)
    if not machine.cuda:
        return {**network, **given}
    decided = network | {"OMP_NUM_THREADS": _threads(machine, inherited)}
    # Tensor and context parallelism overlap communication with computation in launch order, which needs one queue. FSDP
    # gathers concurrently with computation and needs several queues.
    connections = inherited.get("CUDA_DEVICE_MAX_CONNECTIONS", None if run.megatron_fsdp else "1")
    if connections is not None:
        decided["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
    decided |= nccl
    if run.deterministic:
        decided |= DETERMINISTIC
    return {**decided, **given, "CUDA_VISIBLE_DEVICES": str(gpu)}


def network_environment(network: Network, inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables that bind gloo and NCCL to the interface with the node's address, except those `inherited`.

    By default gloo announces the address of the host name, which is 127.0.1.1 on Debian, and NCCL takes the first
    interface of its own list. "=" makes NCCL match the exact name instead of a prefix.
    """
    if not network.interface:
        return {}
    decided = {"GLOO_SOCKET_IFNAME": network.interface, "NCCL_SOCKET_IFNAME": f"={network.interface}"}
    return {name: value for name, value in decided.items() if name not in inherited}


def _threads(machine: Machine, inherited: Mapping[str, str]) -> str:
    """Threads of one rank: its share of the node's cores, for the optimizer in host memory.

    Ray sets 1 for every actor that reserves no CPU, so an inherited 1 is ignored.
    """
    chosen = inherited.get("OMP_NUM_THREADS", "1")
    return chosen if chosen != "1" else str(max(1, machine.cores // max(1, machine.gpus)))


def rank_without_gpu(*, expected: bool, found: bool, visible: str | None, torch_version: str) -> str | None:
    """The reason that a rank cannot train: the run uses GPUs and torch finds none, or the reverse; None if it can.

    `visible` is CUDA_VISIBLE_DEVICES. If the rank continued, it would open gloo and wait for ranks that open NCCL.
    """
    if expected == found:
        return None
    if found:
        return "the run trains on CPUs and torch finds a GPU here: hide it with an empty CUDA_VISIBLE_DEVICES"
    return (
        f"the run trains on GPUs, and torch {torch_version} finds none here (CUDA_VISIBLE_DEVICES={visible}): look for"
        " an old driver (nvidia-smi), a build of torch without CUDA, or a Fabric Manager that is down"
    )


def nccl_environment(
    machine: Machine, run: RunFacts, *, given: Mapping[str, str], inherited: Mapping[str, str]
) -> dict[str, str]:
    """NCCL's variables of trainers and servers, decided once by the driver: all members of a group must agree."""
    if not machine.cuda:
        return {}
    cumem = _cumem(run, given, inherited)
    decided = {} if cumem is None else {CUMEM: cumem}
    return decided | CHANNELS if run.broadcasts_weights and run.deterministic_engines else decided


def _cumem(run: RunFacts, given: Mapping[str, str], inherited: Mapping[str, str]) -> str | None:
    """NCCL_CUMEM_ENABLE; None keeps NCCL's default.

    SGLang defaults to 0 (1 with symmetric memory). A run without a common group keeps NCCL's default, which suspending
    communicators needs.
    """
    if CUMEM in given:
        return given[CUMEM]
    if run.broadcasts_weights and run.symmetric_memory:
        return "1"
    if CUMEM in inherited:
        return inherited[CUMEM]
    if run.broadcasts_weights or (run.offloads_training and not run.suspends_nccl):
        return "0"
    return None


def keeps_communicators(
    machine: Machine, environment: Mapping[str, str], *, suspends: bool, paired_stages: bool
) -> str | None:
    """The reason that NCCL's buffers stay on the device while a training rank is offloaded; None if they are released.

    `environment` is the rank's, `suspends` is --offload-train-nccl. With `paired_stages` virtual pipeline stages use
    one communicator per pair of stages.
    """
    if not machine.cuda:
        return "there are none on a machine without GPUs"
    if not suspends:
        return "--no-offload-train-nccl"
    if machine.nccl < SUSPENDS_SINCE:
        return f"NCCL {_dotted(machine.nccl)} cannot suspend them, {_dotted(SUSPENDS_SINCE)} and later can"
    if environment.get(CUMEM) == "0":
        return f"NCCL suspends only with {CUMEM}=1, and it is 0"
    if paired_stages:
        # ranks would suspend the communicators of their pairs in different orders and deadlock
        return "overlapped virtual stages have one for each pair of stages (--no-overlap-p2p-communication has none)"
    return None


def default_group(machine: Machine) -> dict[str, Any]:
    """Machine-dependent arguments of torch.distributed.init_process_group.

    No device is bound to the default group. With a bound device torch would split every later group from the default
    group's communicator, a collective that ranks outside the new group must join: a weight update group with other
    processes, or a gloo group of some ranks, would hang.
    """
    return {"backend": "nccl" if machine.cuda else "gloo", "device_id": None}


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version)) or "of unknown version"


ON_LOOPBACK = {
    # for nodes on one machine: otherwise Ray listens on all addresses and rejects loopback
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray's machine metrics: their ports require no token, and slimrl does not use them
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
    "RAY_enable_metrics_collection": "0",
}


def prepare_ray_environment() -> None:
    """Gives a local cluster an access token, which Ray would otherwise write into the home folder, and restricts it to
    loopback.

    Inside a cluster (RAY_ADDRESS is set) these variables stay unchanged, as do those that the user has set. Compiled
    kernels of this process and its descendants go into a private folder of this user (`kernel_cache`).
    """
    if "RAY_ADDRESS" not in os.environ:
        for name, value in ON_LOOPBACK.items():
            os.environ.setdefault(name, value)
        if "RAY_AUTH_MODE" not in os.environ:
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.update(KEEP_SUBREAPERS)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.update(kernel_cache(os.environ))


def kernel_cache(inherited: Mapping[str, str]) -> dict[str, str]:
    """TORCHINDUCTOR_CACHE_DIR: this user's folder of compiled kernels, which outlives temporary folders of processes.

    Empty if `inherited` has it. Kernels are code: if the folder is not private to this user the variable stays unset,
    with a warning; kernels then go to the process's temporary folder and are removed with it.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in inherited:
        return {}
    # by number: in a container the user may have no name
    folder = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
    try:
        return {"TORCHINDUCTOR_CACHE_DIR": str(make_private(folder))}
    except OSError as error:
        logger.warning("compiled kernels are not cached: %s; remove it or set TORCHINDUCTOR_CACHE_DIR", error)
        return {}
