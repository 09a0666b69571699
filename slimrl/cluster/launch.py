"""The driver's launch decisions for all processes: GPUs or CPU, environments, addresses, the key, the rendezvous.

All actors use the same decisions, wherever Ray places them: a rollout manager on a node without GPUs still starts
servers on GPUs. `slimrl.platform.launch_env` makes those about the environment.

A run on one node listens on loopback only. A run on several nodes, or with an external server or router on another
machine, listens on the node's address. The driver decides this once, when it places the run on GPUs.

The rendezvous of the ranks is a file on one machine, and a port of rank 0 on several. torch's TCP store has no
authentication and listens on all addresses. So the file is in a folder that only its user can enter, and the port is
bound to the one address that the other ranks need.
"""

from __future__ import annotations

import dataclasses
import datetime
import ipaddress
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from slimrl.arguments import Arguments
from slimrl.arguments.engine_groups import kv_transfers, policy_options
from slimrl.engines.backend import backend
from slimrl.engines.http import KEY_OPTION, Key, new_key, no_server
from slimrl.engines.protocol import EngineError, EngineUnavailableError
from slimrl.platform.launch_env import (
    KEEP_SUBREAPERS,
    Machine,
    RunFacts,
    actor_environment,
    nccl_environment,
    network_environment,
    network_of,
    of_driver,
    this_machine,
)

if TYPE_CHECKING:
    from torch.distributed import FileStore, TCPStore

LOOPBACK = "127.0.0.1"
WILDCARDS = ("0.0.0.0", "::", "")
LISTEN_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True)
class BindConfig:
    """`nodes` is the number of Ray nodes; `partner` an external server or router host on another machine, or None."""

    nodes: int = 1
    partner: str | None = None

    @property
    def one_machine(self) -> bool:
        """Whether all connections stay on this machine."""
        return self.nodes == 1 and self.partner is None

    def address(self, node_ip: str) -> str:
        """The listen address on the node whose address in Ray is `node_ip`."""
        if self.one_machine:
            return LOOPBACK
        if self.partner is not None and is_loopback(node_ip):  # Ray itself is local
            return source_address(self.partner)
        return node_ip

    def environment(self, node_ip: str, inherited: Mapping[str, str]) -> dict[str, str]:
        """Variables of every actor that bind gloo and NCCL to the run's listen address, except those `inherited`.

        By default both choose another interface. Empty on several nodes, where each node sets its own.
        """
        if self.nodes > 1:
            return {}
        return network_environment(network_of(self.address(node_ip)), inherited)

    def local_address(self) -> str:
        """The listen address on this process's node."""
        return self.address(node_address())


def node_address() -> str:
    """The address of this node in Ray."""
    import ray  # here, because the ranks import this module and need no Ray

    return ray.util.get_node_ip_address()


def bind_config(args: Arguments) -> BindConfig:
    """From the flags and the joined cluster."""
    import ray

    return BindConfig(sum(node["Alive"] for node in ray.nodes()), partner_of(args))


def partner_of(args: Arguments) -> str | None:
    """The first external server or router host of the flags that is another machine; None if there is none."""
    hosts = [address.rpartition(":")[0].strip("[]") for address in args.rollout_external_engine_addrs or ()]
    hosts += [args.sglang_router_ip] if args.sglang_router_ip is not None else []
    return next((host for host in hosts if not is_this_machine(host)), None)


def is_loopback(address: str) -> bool:
    """Whether it is an address of the loopback interface."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_this_machine(host: str) -> bool:
    """Whether `host` is this machine; false for an unknown name."""
    try:
        found = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {one.address.partition("%")[0] for held in psutil.net_if_addrs().values() for one in held}
    return all(is_loopback(address) or address in own for address in found)


def source_address(host: str) -> str:
    """This machine's source address towards `host`; sends nothing. Raises EngineError if there is no route."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(
            f"{host} (--sglang-router-ip or --rollout-external-engine-addrs) cannot be reached from this machine:"
            f" {error}"
        ) from error


def check_servers_reachable(addresses: Sequence[str]) -> None:
    """Connects once to each "host:port". Raises EngineUnavailableError with one sentence per failed address."""
    with ThreadPoolExecutor(max(len(addresses), 1)) as pool:
        errors = [error for error in pool.map(_connection_error, addresses) if error]
    if errors:
        raise EngineUnavailableError("\n".join(errors))


def _connection_error(address: str) -> str | None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), LISTEN_TIMEOUT_S).close()
    except OSError as error:
        return no_server(address, error)
    return None


def server_host(listens_on: str | None, address: str, nodes: Sequence[str] = ()) -> str:
    """The host for calls to a server: `listens_on` as set by the user, or `address` if unset or a wildcard.

    Raises EngineError if `listens_on` is one address and the servers are on several `nodes`.
    """
    if listens_on is None or listens_on in WILDCARDS:
        return address
    if len(set(nodes)) > 1:
        raise EngineError(
            f"--sglang-host {listens_on} is on one node, and the servers are on {len(set(nodes))}: leave it out, so"
            " that each listens on its own node's address, or give 0.0.0.0"
        )
    return listens_on


def with_key(args: Arguments) -> Arguments:
    """`args` with the run's key in the server options: --sglang-api-key, or a new key."""
    given = args.sglang_options.get(KEY_OPTION)
    key = Key(given) if given else new_key()
    rm_options = args.rm_server_options
    # not for external servers, which may need another key or none
    if args.rm_url is None and args.opd_teacher_urls is None:
        rm_options = rm_options | {KEY_OPTION: Key(rm_options[KEY_OPTION]) if rm_options.get(KEY_OPTION) else key}
    return dataclasses.replace(
        args, sglang_options=args.sglang_options | {KEY_OPTION: key}, rm_server_options=rm_options
    )


def key_of(args: Arguments) -> str | None:
    """The run's key; None before `with_key`."""
    return args.sglang_options.get(KEY_OPTION)


_ACCELERATOR = "accelerator_type:"  # the start of Ray's resource for a kind of real GPU


class DriverWithoutGpuError(RuntimeError):
    """Ray reports GPUs and the driver's node has none: the run would train on CPUs instead."""


class MachineLacksOperatorsError(RuntimeError):
    """A flag whose operators exist for machines of another kind only."""


def check_machine_has_operators(machine: Machine, *, bf16: bool, gpu_flags: Sequence[str]) -> None:
    """Raises MachineLacksOperatorsError for --true-on-policy-mode in the precision of the other kind of machine.

    `gpu_flags` are those of the command line that name kernels of GPUs.
    """
    if bf16 and not machine.cuda:
        raise MachineLacksOperatorsError(
            "--true-on-policy-mode computes in bfloat16 with GPU kernels only, and this machine has no GPU: give"
            " --no-bf16" + (f", and leave {' and '.join(gpu_flags)} out" if gpu_flags else "")
        )
    if machine.cuda and not bf16:
        raise MachineLacksOperatorsError(
            "--true-on-policy-mode computes in float32 on CPUs only, and this machine has a GPU: give --bf16, or set"
            " CUDA_VISIBLE_DEVICES to nothing to train on CPUs"
        )


def check_machine(args: Arguments, launch: Launch) -> None:
    """Raises EngineUnsupportedError if the engines that the run would start cannot run on this machine."""
    if args.rollout_gpus and not args.debug_train_only:
        backend(args.rollout_engine).check_machine(
            args.hf_checkpoint,
            cuda=launch.machine.cuda,
            releases_memory=bool(args.offload_rollout),
            kv_transfers=kv_transfers(args),
            mooncake=args.update_weight_transport == "mooncake" and not args.debug_rollout_only,
            draft_branches=max(map(int, policy_options(args, "speculative_eagle_topk")), default=1),
            python=args.vllm_python,
        )


def _gpu_flags(args: Arguments) -> list[str]:
    named = {name: args.sglang_options.get(name) for name in ("attention_backend", "rl_on_policy_target")}
    flags = [f"--sglang-{name.replace('_', '-')}" for name, value in named.items() if value is not None]
    return flags + ["--attn-implementation"] * (args.attn_implementation is not None)


@dataclasses.dataclass(frozen=True)
class ActorSetup:
    """The working folder and the variables with which every actor begins.

    `by_ray`: Ray sets the variables when it starts the actor's process. That costs each actor another start of Python,
    and it gets none of the processes that Ray has started ahead, so that it happens only where it must.
    """

    folder: Path
    environment: dict[str, str]
    by_ray: bool = True

    def options(self) -> dict[str, Any]:
        """Ray's options for the actor."""
        return {"runtime_env": {"env_vars": self.environment}} if self.by_ray else {}

    def enter(self) -> None:
        """Called first in the actor: Ray starts it in a folder of its own.

        Keeps that folder on a node without the driver's, where only absolute paths can work.
        """
        os.environ.update(self.environment)
        if self.folder.is_dir():
            os.chdir(self.folder)


@dataclasses.dataclass(frozen=True)
class Launch:
    """`environment` is every actor's; `driver` are variables of the driver that ranks inherit unless flags set them.

    `nccl` are NCCL's variables of every rank, as far as flags do not set them. `bind` is set by `placed`, after joining
    the cluster.
    """

    machine: Machine
    run: RunFacts
    environment: dict[str, str]
    driver: dict[str, str]
    nccl: dict[str, str]
    bind: BindConfig = BindConfig()
    subreapers_kept: bool = False  # by the cluster, for all its processes (`KEEP_SUBREAPERS`)

    def actor_setup(self) -> ActorSetup:
        """For actors of this process's working folder."""
        return ActorSetup(Path.cwd(), self.environment, by_ray=not self.subreapers_kept)

    @property
    def servers_nccl(self) -> dict[str, str]:
        """NCCL's variables of the servers, which must equal the ranks' only within a common NCCL group."""
        return self.nccl if self.run.broadcasts_weights else {}

    def placed(self, bind: BindConfig) -> Launch:
        """A copy with the addresses of the joined cluster."""
        environment = self.environment | bind.environment(node_address(), os.environ)
        # a driver on the only node has the variables with which Ray was started there
        kept = bind.nodes == 1 and KEEP_SUBREAPERS.items() <= os.environ.items()
        return dataclasses.replace(self, bind=bind, environment=environment, subreapers_kept=kept)

    @classmethod
    def of_run(cls, args: Arguments) -> Launch:
        """The decisions for this process's machine and environment. Raises MachineLacksOperatorsError."""
        if args.true_on_policy_mode:
            check_machine_has_operators(this_machine(), bf16=args.bf16, gpu_flags=_gpu_flags(args))
        return cls.decide(this_machine(), run_facts(args), args.train_env_vars, os.environ)

    @classmethod
    def decide(cls, machine: Machine, run: RunFacts, given: Mapping[str, str], inherited: Mapping[str, str]) -> Launch:
        """`given` are --train-env-vars, `inherited` the driver's variables."""
        nccl = nccl_environment(machine, run, given=given, inherited=inherited)
        return cls(machine, run, actor_environment(machine, inherited), of_driver(inherited), nccl)


@dataclasses.dataclass(frozen=True)
class RankLocation:
    """The location of a training rank: its GPU's number (or UUID) on its node, and the node's number of GPUs."""

    gpu: int | str
    gpus_of_node: int


def run_facts(args: Arguments) -> RunFacts:
    """The launch-relevant facts from the flags."""
    return RunFacts(
        broadcasts_weights=args.broadcasts_weights and not args.debug_train_only and not args.debug_rollout_only,
        shares_gpus=args.colocate,
        offloads_training=bool(args.offload_train),
        suspends_nccl=args.offload_train_nccl,
        megatron_fsdp=args.use_megatron_fsdp,
        symmetric_memory=any(policy_options(args, "enable_symm_mem")),
        deterministic=args.deterministic_mode,
        deterministic_engines=any(policy_options(args, "enable_deterministic_inference")),
    )


def check_driver_sees_gpus(machine: Machine, resources: Mapping[str, float], environment: Mapping[str, str]) -> None:
    """Raises DriverWithoutGpuError if Ray's `resources` have physical GPUs and the driver's `machine` has none.

    Logical GPUs (`ray start --num-gpus N` without a GPU) have no accelerator type. An empty CUDA_VISIBLE_DEVICES in the
    driver's `environment` hides the GPUs on purpose.
    """
    kinds = sorted(name.removeprefix(_ACCELERATOR) for name in resources if name.startswith(_ACCELERATOR))
    hidden = environment.get("CUDA_VISIBLE_DEVICES") == ""
    if machine.cuda or hidden or not kinds or not resources.get("GPU"):
        return
    raise DriverWithoutGpuError(
        f"Ray reports {resources['GPU']:g} GPUs ({', '.join(kinds)}) and the driver's node has none, so the run"
        " would train on CPUs: start the driver on a node with GPUs (ray job submit --entrypoint-label-selector"
        f' \'{{"ray.io/accelerator-type": "{kinds[0]}"}}\' ...), install a CUDA build of torch there, or set'
        " CUDA_VISIBLE_DEVICES to nothing to train on CPUs on purpose"
    )


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """Either a file, or host and port."""

    path: str | None = None
    host: str = ""
    port: int = 0


def create_store(
    host: str | None, world_size: int, timeout: datetime.timedelta
) -> tuple[Rendezvous, FileStore | TCPStore]:
    """Creates the store on rank 0; `host` is its address for other machines, None if all ranks are on this one."""
    if host is None:
        # removed with the temporary folder of this process
        rendezvous = Rendezvous(path=f"{tempfile.mkdtemp(prefix='rendezvous-')}/store")
        return rendezvous, join_store(rendezvous, world_size, timeout)
    # Bound here and kept open: another process could take a port that was only probed.
    from slimrl.weights.update.transport_distributed import listening_store

    store = listening_store(host, timeout)
    return Rendezvous(host=host, port=store.port), store


def join_store(rendezvous: Rendezvous, world_size: int, timeout: datetime.timedelta) -> FileStore | TCPStore:
    """Joins the store of rank 0, on the other ranks."""
    from torch.distributed import FileStore, TCPStore

    if rendezvous.path is None:
        return TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
    store = FileStore(rendezvous.path, world_size)
    store.set_timeout(timeout)
    return store
