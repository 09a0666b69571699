"""The process groups of a training rank.

Opens and closes torch.distributed and megatron-core's groups for one process. `initialize` also applies the CPU
patches, binds the device and seeds every generator. Called by the trainer and by the converters. `Communicators` frees
the device memory of the groups while a rank is offloaded.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from slimrl.arguments.namespace import MegatronArguments
from slimrl.megatron import patches
from slimrl.platform import bind_local_device, is_cpu, seed_everything, use_deterministic_kernels
from slimrl.platform.launch_env import default_group, keeps_communicators, this_machine

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ParallelState:
    """This process' ranks and sizes along each parallel axis, and its process groups."""

    rank: int
    world_size: int
    device: torch.device
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    cp_rank: int
    cp_size: int
    virtual_stages: int | None  # virtual pipeline stages per rank; None without virtual stages
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    dp_cp_group: dist.ProcessGroup
    ep_rank: int
    ep_size: int
    etp_rank: int
    etp_size: int
    ep_group: dist.ProcessGroup  # expert parallel
    etp_group: dist.ProcessGroup  # expert tensor parallel

    @property
    def part(self) -> tuple[int, ...]:
        """The part of the model on this rank: ranks with the same one have the same weights."""
        return self.pp_rank, self.tp_rank, self.ep_rank, self.etp_rank

    @property
    def is_last_stage(self) -> bool:
        """True on ranks of the last pipeline stage, which compute logits."""
        return self.pp_rank == self.pp_size - 1

    @property
    def leads_replica(self) -> bool:
        """True on one rank of each data-parallel rank, of the last stage: it has every column of its samples."""
        return self.is_last_stage and not self.tp_rank and not self.cp_rank

    def holds_embedding(self, virtual_stage: int | None) -> bool:
        """True if this (virtual) stage of this rank starts with the embedding."""
        return self.pp_rank == 0 and not virtual_stage

    def holds_head(self, virtual_stage: int | None) -> bool:
        """True if this (virtual) stage of this rank ends with the logits."""
        last = virtual_stage is None or self.virtual_stages is None or virtual_stage == self.virtual_stages - 1
        return self.is_last_stage and last

    def from_last_stage(self, values: Tensor) -> Tensor:
        """Broadcast `values` from the last pipeline stage, in place; collective over the stages."""
        if self.pp_size > 1:
            dist.broadcast(values, group=self.pp_group, group_src=self.pp_size - 1)
        return values

    def from_leader(self, values: Tensor) -> Tensor:
        """Broadcast `values` from the rank that `leads_replica`, in place; collective over the ranks of its samples."""
        for group in (self.cp_group, self.tp_group):
            if group.size() > 1:
                dist.broadcast(values, group=group, group_src=0)
        return self.from_last_stage(values)


def initialize(
    flags: MegatronArguments,
    *,
    rank: int,
    world_size: int,
    local_rank: int = 0,
    init_method: str | dist.Store = "env://",
    timeout_minutes: int = 30,
) -> ParallelState:
    """Open torch.distributed and megatron-core's groups; returns this process' `ParallelState`.

    With --deterministic-mode torch's operations are deterministic from here on. Collective over `world_size` processes.
    `init_method` is torch's, for example "tcp://host:port", or the processes' common store; `timeout_minutes` is the
    longest wait of one collective. Raises ValueError if the parallel sizes do not divide the world size.
    """
    model_parallel = flags.tensor_model_parallel_size * flags.pipeline_model_parallel_size * flags.context_parallel_size
    if world_size % model_parallel:
        raise ValueError(
            f"{world_size} training ranks cannot be split into model copies of {model_parallel} ranks"
            f" (--tensor-model-parallel-size {flags.tensor_model_parallel_size} x --pipeline-model-parallel-size"
            f" {flags.pipeline_model_parallel_size} x --context-parallel-size {flags.context_parallel_size}):"
            " change the number of ranks or one of the three sizes"
        )
    tensor, divides_experts = flags.tensor_model_parallel_size, flags.expert_tensor_parallel_size > 1
    uneven = flags.expert_model_parallel_size > 1 or flags.expert_tensor_parallel_size > tensor
    if is_cpu() and divides_experts and uneven:
        raise ValueError(
            f"--expert-model-parallel-size {flags.expert_model_parallel_size} and --tensor-model-parallel-size {tensor}"
            f" with --expert-tensor-parallel-size {flags.expert_tensor_parallel_size} send ranks parts of unequal size,"
            " which gloo, the backend on machines without GPUs, does not support: give --expert-tensor-parallel-size 1"
        )
    device = bind_local_device(local_rank)
    if flags.deterministic_mode:
        use_deterministic_kernels()
    timeout = datetime.timedelta(minutes=timeout_minutes)
    rendezvous = {"init_method": init_method} if isinstance(init_method, str) else {"store": init_method}
    dist.init_process_group(
        **default_group(this_machine()), **rendezvous, rank=rank, world_size=world_size, timeout=timeout
    )
    patches.activate(batch_invariant=flags.true_on_policy_mode)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=flags.tensor_model_parallel_size,
        pipeline_model_parallel_size=flags.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=flags.virtual_pipeline_model_parallel_size,
        context_parallel_size=flags.context_parallel_size,
        expert_model_parallel_size=flags.expert_model_parallel_size,
        expert_tensor_parallel_size=flags.expert_tensor_parallel_size,
        distributed_timeout_minutes=timeout_minutes,
        # slimrl does not use the second, gloo set of groups, and opening it costs start-up time.
        create_gloo_process_groups=False,
    )
    # Pipeline stages need different random numbers; data-parallel replicas the same (their weights start equal).
    stage_seed = flags.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    seed_everything(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed, force_reset_rng=True)
    return _current_state(rank, world_size, device, flags.virtual_pipeline_model_parallel_size)


def _current_state(rank: int, world_size: int, device: torch.device, virtual_stages: int | None) -> ParallelState:
    groups = {
        "tp_group": parallel_state.get_tensor_model_parallel_group(),
        "pp_group": parallel_state.get_pipeline_model_parallel_group(),
        "dp_group": parallel_state.get_data_parallel_group(),
        "cp_group": parallel_state.get_context_parallel_group(),
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "ep_group": parallel_state.get_expert_model_parallel_group(),
        "etp_group": parallel_state.get_expert_tensor_parallel_group(),
    }
    places: dict[str, Any] = {}
    for axis in ("tp", "pp", "dp", "cp", "ep", "etp"):
        group = groups[f"{axis}_group"]
        places |= {f"{axis}_rank": group.rank(), f"{axis}_size": group.size()}
    return ParallelState(
        rank=rank, world_size=world_size, device=device, virtual_stages=virtual_stages, **places, **groups
    )


def shutdown() -> None:
    """Close megatron-core's groups and torch.distributed; does nothing if none is open."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


class Backend(Protocol):
    """The used interface of `torch.distributed`'s backends; both calls are collective over the backend's ranks."""

    def _is_initialized(self) -> bool: ...

    def suspend(self) -> None: ...

    def resume(self) -> None: ...


class Communicators:
    """The communicators of one rank, in an order that is the same on all ranks that share them.

    NCCL 2.29.7 and later can suspend a communicator, which frees its device buffers (hundreds of MiB per group) and
    keeps its connections.
    """

    def __init__(self, backends: Iterable[Backend]) -> None:
        self._backends = list(backends)
        self._suspended: list[Backend] = []

    def suspend(self) -> None:
        """Frees their device memory; no collective may run until `resume`. Collective over all ranks.

        The first collective of a group creates its communicator on all of the group's ranks. A group without one has
        nothing to free, and suspending it would fail.
        """
        self._suspended = [backend for backend in self._backends if backend._is_initialized()]
        for backend in self._suspended:
            backend.suspend()

    def resume(self) -> None:
        """Allocates the memory of the suspended communicators again. Collective over all ranks."""
        for backend in self._suspended:
            backend.resume()
        self._suspended = []


def open_communicators(device: torch.device, *, suspends: bool, paired_stages: bool) -> Communicators:
    """Every NCCL communicator of Megatron's groups that is suspended with the rank; none on the CPU.

    `suspends` is --offload-train-nccl; with `paired_stages` virtual pipeline stages exchange in pairs.
    """
    if device.type != "cuda":
        return Communicators([])
    why = keeps_communicators(this_machine(), os.environ, suspends=suspends, paired_stages=paired_stages)
    if why is not None:
        logger.warning("NCCL communicators keep their device memory while the trainer is offloaded: %s", why)
        return Communicators([])
    return Communicators(distinct_backends(_groups(), device))


def distinct_backends(groups: Iterable[dist.ProcessGroup], device: torch.device) -> list[Backend]:
    """The distinct backends of the groups for `device`, without groups of one rank, which have no connections."""
    found: dict[int, Backend] = {}
    for group in groups:
        if group.size() > 1:
            backend: Any = group._get_backend(device)
            found[id(backend)] = backend
    return list(found.values())


def _groups() -> list[Any]:
    """Megatron's list of groups in creation order, which is the same on all ranks."""
    made = parallel_state._global_process_group_list or []
    return [dist.group.WORLD if group is None else group for group in made]
