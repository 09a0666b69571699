"""Data parallelism: Megatron-FSDP (ZeRO-1 to ZeRO-3) or replicated weights, and communication overlap.

Outside of a training pass every rank's stages have ordinary, full parameters, so code that updates engines, saves or
exports weights does not handle shards. The optimizer's state is saved in the format of the distributed optimizer, so
Megatron-FSDP and the distributed optimizer can resume each other's checkpoints. Gradients are reduced once per
optimizer step. Without Megatron-FSDP and the flags for overlap, `install_sync_funcs` and `overlapped_param_gather` do
nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed.tensor import DTensor

from slimrl.megatron.ref_model import BaseReference, ReferenceWeights
from slimrl.weights.update.shared_memory import shared_copies, shared_file

Stage: TypeAlias = DistributedDataParallel | FullyShardedDataParallel

_MOMENTS = ("exp_avg", "exp_avg_sq")


def wrap(config: DistributedDataParallelConfig, stages: Sequence[GPTModel], device: torch.device) -> list[Stage]:
    """Wrap the stages for training: in Megatron-FSDP with --use-megatron-fsdp, else with full weights on each rank.

    The stages of Megatron-FSDP are sharded until `all_gather_params`; build the optimizer before that.
    """
    if not config.use_megatron_fsdp:
        return [DistributedDataParallel(stage.config, dataclasses.replace(config), stage) for stage in stages]
    wrapped = []
    for stage in stages:
        wrapped.append(FullyShardedDataParallel(stage.config, dataclasses.replace(config), stage, device=device))
        # They would reshard the parameters while another function saves the stage.
        for module in wrapped[-1].modules():
            module._state_dict_pre_hooks.clear()
    for shard in _shards(wrapped):
        if shard.is_expert:  # as on the weight itself: experts have separate parameter groups
            shard.trained.allreduce = False  # type: ignore[attr-defined]
    return wrapped


@torch.no_grad()
def share_weights(stages: Iterable[Stage]) -> None:
    """Move the weights into memory that engines on this machine can open (`weights.update.shared_memory`).

    For a trainer without a GPU, before its optimizer is built, which keeps views of the weights. Megatron-FSDP has full
    weights only between passes: they stay where they are.
    """
    for stage in stages:
        if not isinstance(stage, DistributedDataParallel):
            continue
        for buffer in (*stage.buffers, *stage.expert_parallel_buffers):
            if buffer.param_data is not None:
                old, (buffer.param_data,) = buffer.param_data, shared_copies([buffer.param_data])
                for parameter in buffer.params:
                    parameter.data = _moved(parameter.data, old, buffer.param_data)
                for bucket in buffer.buckets:
                    bucket.param_data = _moved(bucket.param_data, old, buffer.param_data)
        others = [parameter for parameter in stage.parameters() if shared_file(parameter) is None]
        for parameter, copy in zip(others, shared_copies(others), strict=True):
            parameter.data = copy


def _moved(view: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """The view of `new` that `view` is of `old`."""
    return new.as_strided(view.shape, view.stride(), view.storage_offset() - old.storage_offset())


def all_gather_params(stages: Iterable[Stage]) -> None:
    """Gather the full parameters of this rank's Megatron-FSDP stages, until the next pass; collective."""
    for stage in stages:
        if isinstance(stage, FullyShardedDataParallel):
            stage.start_param_sync(force_sync=True)
            stage.module._replace_param_with_raw_if_needed()


class GatheredWeights:
    """The full weights that the stages of Megatron-FSDP have between passes, beside their shards; none of others."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._stages = [stage for stage in stages if isinstance(stage, FullyShardedDataParallel)]

    def drop(self) -> None:
        """Free them, until `gather` or the next pass."""
        for stage in self._stages:
            stage.module.synchronize_param_gather()

    def gather(self) -> None:
        """Gather them from the shards; collective."""
        all_gather_params(self._stages)


@dataclasses.dataclass(frozen=True)
class _Shard:
    """One weight: the compute parameter, the optimizer's, and this rank's part of the flattened weight."""

    parameter: torch.nn.Parameter
    trained: torch.nn.Parameter  # a DTensor, in float32 if the optimizer keeps master weights
    part: slice
    group: dist.ProcessGroup
    is_expert: bool

    @torch.no_grad()
    def whole(self, shard: DTensor) -> Tensor:
        """The full tensor, on the CPU, of a DTensor that is sharded like the weight; collective over `group`."""
        full = shard.to_local().new_zeros(self.parameter.numel())
        full[self.part] = shard.to_local().flatten()
        # Shards differ in size, which not every backend can gather; the sum with zeros is exact.
        dist.all_reduce(full, group=self.group)
        return full.view(self.parameter.shape).cpu()

    @torch.no_grad()
    def fill(self, shard: DTensor, full: Tensor) -> None:
        """Copy this rank's part of `full` into a DTensor that is sharded like the weight."""
        local = shard.to_local()
        local.copy_(full.flatten()[self.part].view(local.shape))


def _shards(stages: Iterable[FullyShardedDataParallel]) -> Iterator[_Shard]:
    for stage in stages:
        buffer = stage.param_and_grad_buffer
        for _, trained in buffer.optimizer_named_parameters:
            group = buffer.parameter_groups[buffer.param_to_param_group[trained.orig_param]]
            yield _Shard(
                parameter=trained.orig_param,
                trained=trained,
                part=trained.megatron_fsdp_slice,
                group=group.model_weight_buffer.data_parallel_group,
                is_expert=group.is_expert_param,
            )


class ShardedReference:
    """Reference weights for stages that were wrapped afterwards: this rank's part of each weight."""

    def __init__(self, reference: ReferenceWeights, stages: Sequence[FullyShardedDataParallel]):
        self._gathered = GatheredWeights(stages)
        groups = [group for stage in stages for group in stage.param_and_grad_buffer.parameter_groups]
        buffers = [group.model_weight_buffer for group in groups]
        numbers = {id(tensor): number for number, tensor in enumerate(reference.tensors)}
        parts = []
        for group, buffer in zip(groups, buffers, strict=True):
            own = buffer.data.clone()
            for parameter in group.params:
                value = reference.value(numbers.pop(id(parameter)))
                buffer.set_item(buffer.param_idx[parameter], value.to(own.device))
            parts.append(buffer.data.to("cpu", copy=True))
            buffer.data.copy_(own)
        rest = [(reference.tensors[number], reference.value(number)) for number in numbers.values()]
        self._weights = ReferenceWeights.from_pairs(
            [*zip((buffer.data for buffer in buffers), parts, strict=True), *rest]
        )

    @property
    def host_bytes(self) -> int:
        """As `ReferenceWeights.host_bytes`."""
        return self._weights.host_bytes

    def update(self) -> None:
        """As `ReferenceWeights.update`."""
        self._weights.update()

    @contextlib.contextmanager
    def loaded_weights(self) -> Iterator[None]:
        """As `ReferenceWeights.loaded_weights`; invalidates gathered weights before and after."""
        self._gathered.drop()
        with self._weights.loaded_weights():
            yield
            self._gathered.drop()


def shard_reference(
    reference: ReferenceWeights | BaseReference | None, stages: Sequence[Stage]
) -> ReferenceWeights | ShardedReference | BaseReference | None:
    """The reference weights for the wrapped `stages`."""
    sharded = [stage for stage in stages if isinstance(stage, FullyShardedDataParallel)]
    return ShardedReference(reference, sharded) if sharded and isinstance(reference, ReferenceWeights) else reference


def patch_fsdp_state_dict(optimizer: DistributedOptimizer) -> None:
    """Give `optimizer`, over the stages of Megatron-FSDP, a state dict that torch_dist checkpoints can hold."""
    optimizer.sharded_state_dict = types.MethodType(_sharded_state_dict, optimizer)
    optimizer.load_state_dict = types.MethodType(_load_state_dict, optimizer)


def _groups(optimizer: DistributedOptimizer) -> dict[bool, list[dict[str, Any]]]:
    """Parameter groups of dense and of expert weights: the parts that the distributed optimizer would have."""
    kinds: dict[bool, list[dict[str, Any]]] = {}
    for group in optimizer.param_groups:
        kinds.setdefault(group["is_expert_parallel"], []).append(group)
    return dict(sorted(kinds.items()))


def _sharded_state_dict(
    self: DistributedOptimizer,
    model_sharded_state_dict: ShardedStateDict,
    is_loading: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> ShardedStateDict:
    """Full tensors of every trained weight's master weight and moments, under the weights' names; collective."""
    found, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    of_weight = {id(sharded.data): sharded for sharded in nested_values(found)}
    groups = _groups(self)
    tensors: dict[bool, dict[int, ShardedStateDict]] = {kind: {} for kind in groups}
    for shard in _shards(self.model_chunks):
        if not shard.parameter.requires_grad:
            continue
        state, part = self.optimizer.state[shard.trained], tensors[shard.is_expert]
        part[len(part)] = {
            name: make_sharded_optimizer_tensor(
                of_weight[id(shard.parameter)],
                torch.empty(shard.parameter.shape, dtype=tensor.dtype) if is_loading else shard.whole(tensor),
                prefix=f"optimizer.state.{name}",
            )
            for name, tensor in (("param", shard.trained), *((name, state[name]) for name in _MOMENTS))
        }
    # weights without a part on this rank are not stepped; the saver makes all ranks agree
    step = max(_steps(self), default=0.0)
    parts = [
        {
            "optimizer": {"param_groups": [_without_weights(group) | {"step": step} for group in of_kind]},
            "param_state": tensors[kind],
            "param_state_sharding_type": "fully_reshardable",
        }
        for kind, of_kind in groups.items()
    ]
    return parts[0] if len(parts) == 1 else dict(enumerate(parts))


def _steps(optimizer: DistributedOptimizer) -> Iterator[float]:
    """All step counts: torch's AdamW has one per parameter, a fused Adam one per parameter group."""
    for counter in (*optimizer.optimizer.state.values(), *optimizer.param_groups):
        if "step" in counter:
            yield float(counter["step"])


def _without_weights(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _load_state_dict(self: DistributedOptimizer, state_dict: ShardedStateDict) -> None:
    """Load a state of `_sharded_state_dict`, or of the distributed optimizer; gathered weights become stale."""
    parts = [state_dict] if "param_state" in state_dict else [state_dict[number] for number in sorted(state_dict)]
    step = parts[0]["optimizer"]["param_groups"][0]["step"]
    tensors = {kind: iter(parts[number]["param_state"].items()) for number, kind in enumerate(_groups(self))}
    for shard in _shards(self.model_chunks):
        if not shard.parameter.requires_grad:
            continue
        _, loaded = next(tensors[shard.is_expert])
        state = self.optimizer.state[shard.trained]
        if isinstance(self.optimizer, torch.optim.Adam):
            state["step"] = torch.tensor(float(step))
        shard.fill(cast("DTensor", shard.trained), loaded["param"])
        for name in _MOMENTS:
            shard.fill(state[name], loaded[name])
    if not isinstance(self.optimizer, torch.optim.Adam):
        for group in self.param_groups:
            group["step"] = int(step)
    for stage in self.model_chunks:
        stage.param_and_grad_buffer.copy_main_weights_to_model_weights()


def install_sync_funcs(stages: Sequence[Stage]) -> None:
    """Set the schedule's communication hooks in the model's configuration."""
    first = stages[0]
    if first.ddp_config.overlap_grad_reduce:
        # Without it every micro-batch would reduce the gradients again.
        no_sync = [stage.no_sync for stage in stages]
        first.config.no_sync_func = no_sync if len(stages) > 1 else no_sync[0]
    if isinstance(first, DistributedDataParallel) and first.use_forward_hook:
        if first.ddp_config.align_param_gather:
            first.config.param_sync_func = [stage.start_param_sync for stage in stages]
        for stage in stages:
            stage.disable_forward_pre_hook(param_sync=False)


@contextlib.contextmanager
def overlapped_param_gather(stages: Sequence[Stage]) -> Iterator[None]:
    """Within the block a forward pass gathers the weights that are sharded since the last optimizer step.

    For --overlap-param-gather and --use-megatron-fsdp; afterwards the weights are full.
    """
    late = [stage for stage in stages if isinstance(stage, DistributedDataParallel) and stage.use_forward_hook]
    for stage in late:
        stage.enable_forward_pre_hook()
    yield
    for stage in late:
        stage.disable_forward_pre_hook(param_sync=True)
    all_gather_params(stages)
