"""What the driver decides once for all processes of a run: GPUs or not, environments, NCCL settings.

Promises that every actor is started by the same decision, wherever Ray places it: a rollout manager on a node without
GPUs still starts servers on GPUs. The decisions themselves are `slimrl.platform.decisions`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from slimrl.arguments import Arguments
from slimrl.cluster.reach import Reach, node_address
from slimrl.platform.decisions import RunFacts, actor_environment, nccl_cumem, of_driver
from slimrl.platform.machine import Machine, this_machine

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
class RankPlace:
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
