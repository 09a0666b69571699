"""What the driver decides once for all processes (GPUs or CPU, environments, NCCL), and the training ranks' rendezvous.

Every actor is started by the same decision, wherever Ray places it: a rollout manager on a node without GPUs still
starts servers on GPUs. The decisions themselves are `slimrl.platform.launch_env`.
Ranks meet at a file on one machine, at a port of rank 0 on several. torch's store over TCP knows no key and listens on
all addresses. So the file is in a folder that only its user may enter, and the port is bound to the one address that
the other ranks need.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING

from slimrl.arguments import Arguments
from slimrl.cluster.network import Reach, node_address
from slimrl.platform.launch_env import Machine, RunFacts, actor_environment, nccl_cumem, of_driver, this_machine

if TYPE_CHECKING:
    from torch.distributed import FileStore, TCPStore


_ACCELERATOR = "accelerator_type:"  # the start of Ray's resource for a kind of real GPU


class DriverWithoutGpuError(RuntimeError):
    """Ray reports GPUs and the driver's node has none: the run would train on CPUs beside them."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """`environment` is that of every actor; `driver` are variables of the driver that ranks get where flags have none.

    `nccl_cumem` is NCCL_CUMEM_ENABLE of every rank; None: unset. `reach` is known once the cluster is.
    """

    machine: Machine
    run: RunFacts
    environment: dict[str, str]
    driver: dict[str, str]
    nccl_cumem: str | None
    reach: Reach = Reach()

    @property
    def servers_nccl_cumem(self) -> str | None:
        """The same for servers: only those that are in a group with ranks must agree with them."""
        return self.nccl_cumem if self.run.broadcasts_weights else None

    def placed(self, reach: Reach) -> Launch:
        """The same on the cluster that was joined, from where it is reached."""
        environment = self.environment | reach.environment(node_address(), os.environ)
        return dataclasses.replace(self, reach=reach, environment=environment)

    @classmethod
    def of_run(cls, args: Arguments) -> Launch:
        """Looks at this process's machine and environment."""
        return cls.decide(this_machine(), run_facts(args), args.train_env_vars, os.environ)

    @classmethod
    def decide(cls, machine: Machine, run: RunFacts, given: Mapping[str, str], inherited: Mapping[str, str]) -> Launch:
        """`given` are --train-env-vars, `inherited` the driver's variables."""
        cumem = nccl_cumem(machine, run, given=given, inherited=inherited)
        return cls(machine, run, actor_environment(machine, inherited), of_driver(inherited), cumem)


@dataclasses.dataclass(frozen=True)
class RankLocation:
    """Where a training rank runs: its GPU's number (or UUID) on its node, and how many GPUs the node has."""

    gpu: int | str
    gpus_of_node: int


def run_facts(args: Arguments) -> RunFacts:
    """What of the flags bears on how processes are started."""
    both_sides = not args.debug_train_only and not args.debug_rollout_only
    return RunFacts(
        broadcasts_weights=both_sides and not args.colocate and args.update_weight_transport == "nccl",
        shares_gpus=args.colocate,
        offloads_training=bool(args.offload_train),
        suspends_nccl=args.offload_train_nccl,
        megatron_fsdp=args.use_megatron_fsdp,
        symmetric_memory=bool(args.sglang_options.get("enable_symm_mem")),
        deterministic=args.deterministic_mode,
    )


def check_driver_sees_gpus(machine: Machine, resources: Mapping[str, float], environment: Mapping[str, str]) -> None:
    """Raises DriverWithoutGpuError where Ray's `resources` name real GPUs and the driver's `machine` has none.

    Logical GPUs (`ray start --num-gpus N` without a GPU) have no accelerator type. An empty CUDA_VISIBLE_DEVICES in the
    driver's `environment` hides the GPUs on purpose.
    """
    kinds = sorted(name.removeprefix(_ACCELERATOR) for name in resources if name.startswith(_ACCELERATOR))
    hidden = environment.get("CUDA_VISIBLE_DEVICES") == ""
    if machine.cuda or hidden or not kinds or not resources.get("GPU"):
        return
    raise DriverWithoutGpuError(
        f"Ray reports {resources['GPU']:g} GPUs ({', '.join(kinds)}) and the node of this driver sees none, so the run"
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


def open_meeting(
    host: str | None, world_size: int, timeout: datetime.timedelta
) -> tuple[Rendezvous, FileStore | TCPStore]:
    """For rank 0: `host` is the address that the others reach it at, None where all are on this machine."""
    if host is None:
        # goes with the temporary folder of this process
        meeting = Rendezvous(path=f"{tempfile.mkdtemp(prefix='meeting-')}/store")
        return meeting, join_meeting(meeting, world_size, timeout)
    # Bound here and kept, because a port that was only looked for may be somebody else's a moment later.
    from slimrl.weights.update.transport_distributed import listening_store

    store = listening_store(host, timeout)
    return Rendezvous(host=host, port=store.port), store


def join_meeting(meeting: Rendezvous, world_size: int, timeout: datetime.timedelta) -> FileStore | TCPStore:
    """For the other ranks."""
    from torch.distributed import FileStore, TCPStore

    if meeting.path is None:
        return TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
    store = FileStore(meeting.path, world_size)
    store.set_timeout(timeout)
    return store
