"""The optimizer's state as checkpoint content, of the distributed optimizer each rank's part as it lies in memory.

A data-parallel rank owns a range of elements of the buffer that holds all parameters, so at most two of its parameters
are cut anywhere. The range of one parameter is divided into boxes of the whole tensor (at most 2 n - 1 for n
dimensions), and each box is one stored block. Keys, shapes and dtypes are those of megatron-core's `fully_reshardable`
format, which gathers the state of all ranks first and writes whole shards: the two read each other's files, in any
layout. Nothing is gathered or copied here. Loading reads into the optimizer's own tensors.

megatron-core 0.16.1 saves and loads the state of torch's AdamW with faults, which are corrected here: every parameter
has one step counter, exact after loading. `convert_step_format` converts between torch's AdamW and the fused Adam of
Transformer Engine or Apex: torch counts steps per parameter, the fused ones per parameter group. Step count and moments
stay the same, whichever implementation saved them.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import types
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed.tensor import DTensor

_logger = logging.getLogger(__name__)
_Entry: TypeAlias = ShardedTensor | ShardedTensorFactory


def store_without_gathering(part: DistributedOptimizer) -> None:
    """Make `part` store and load its own elements only, instead of gathering those of all data-parallel ranks.

    A model whose layers store a weight in blocks that are not ranges of it keeps megatron-core's way; the log says so.
    """
    original, scatter = part.sharded_state_dict, part.load_parameter_state_from_fully_reshardable

    def sharded_state_dict(
        self: DistributedOptimizer,
        model_sharded_state_dict: ShardedStateDict,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        entries = _entries(model_sharded_state_dict)
        if foreign := _not_ranges(self, entries):
            _logger.info("the optimizer state is gathered to be stored: %s is not stored as ranges of it", foreign)
            return original(model_sharded_state_dict, is_loading, sharding_type, metadata)
        # without megatron-core's garbage collection, which takes half a second and is for the gathered tensors
        if is_loading:
            self.load_state_dict(self.state_dict())  # creates state that the first step would create
        return {
            **self.state_dict(),
            "param_state": _own_state(self, entries),
            "param_state_sharding_type": "fully_reshardable",
        }

    def load(self: DistributedOptimizer, state_dict: dict[Any, Any]) -> None:
        if any("boxes" not in state for state in state_dict.values()):
            scatter(state_dict)
            return
        _load_own_state(self, state_dict)

    part.sharded_state_dict = types.MethodType(sharded_state_dict, part)
    part.load_parameter_state_from_fully_reshardable = types.MethodType(load, part)


def _entries(model: ShardedStateDict) -> dict[Tensor, _Entry]:
    """How each parameter of the model is stored."""
    sharded, _ = extract_sharded_tensors_and_factories(model)
    return {entry.data: entry for entry in nested_values(sharded)}


def _not_ranges(part: DistributedOptimizer, entries: dict[Tensor, _Entry]) -> str | None:
    """The key of a parameter that cannot be cut; the same on all ranks that share the buffers."""
    for buffer in part.buffers:
        for parameter in buffer.param_index_map:
            if _blocks(entries[parameter], entries[parameter].key, torch.float32, 0) is None:
                return str(entries[parameter].key)
    return None


def _own_state(part: DistributedOptimizer, entries: dict[Tensor, _Entry]) -> dict[int, Any]:
    """This rank's elements by the number of the parameter; float32, and the live tensors where they are that."""
    state = {}
    for number, (parameter, begin) in enumerate(_owned(part)):
        entry = entries[parameter]
        live = part._get_main_param_and_optimizer_states(parameter)
        if live["param"].dtype == torch.int16:
            live["param"] = joined_master(_weights(part, parameter), live["param"])
        values = {
            name: tensor.detach().float().view(-1)
            for name, tensor in live.items()
            if name != "step"  # kept with the parameter groups
        }
        replica = (*entry.replica_id[:2], part.distributed_optimizer_instance_id)
        boxes = {
            name: cut(entry, f"optimizer.state.{name}.{entry.key}", flat, begin, replica)
            for name, flat in values.items()
        }
        state[number] = {"values": LocalNonpersistentObject(values), "boxes": boxes}
    return state


def _load_own_state(part: DistributedOptimizer, state: dict[Any, Any]) -> None:
    """Take over what was read, except where it was read into the optimizer's own memory."""
    for number, (parameter, _) in enumerate(_owned(part)):
        values, boxes = state[number]["values"], state[number]["boxes"]
        for name, flat in values.items():
            _gather_boxes(flat, boxes[name])
        live = part._get_main_param_and_optimizer_states(parameter)
        if any(live[name].data_ptr() != flat.data_ptr() for name, flat in values.items()):
            if live["param"].dtype == torch.int16:
                weights, values["param"] = split_master(values["param"])
                _weights(part, parameter).detach().view(-1).copy_(weights)
            part._set_main_param_and_optimizer_states(parameter, values)
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        part.optimizer._sync_hdo_state_to_sub_optimizers()


def _weights(part: DistributedOptimizer, parameter: Tensor) -> Tensor:
    """This rank's elements of a parameter as the model has them, of an optimizer that keeps the rest of them."""
    group, place = part.model_param_group_index_map[parameter]
    weights: Tensor = part.optimizer.param_groups[group]["params"][place]
    return weights


def joined_master(weights: Tensor, rest: Tensor) -> Tensor:
    """Float32 master weights from their bf16 rounding and the int16 `rest` that Transformer Engine's FusedAdam keeps.

    `rest` (--store-param-remainders) is the low half of the master's bits; where it is negative, the high half was
    rounded up. All have the same shape.
    """
    high = weights.detach().view(torch.int16).to(torch.int32) << 16
    return (high + rest.to(torch.int32)).view(torch.float32)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `joined_master`: bf16 weights and int16 rests of float32 `master`."""
    bits = master.contiguous().view(torch.int32)
    low = bits & 0xFFFF
    rest = torch.where(low < 1 << 15, low, low - (1 << 16))
    return ((bits - rest) >> 16).to(torch.int16).view(torch.bfloat16), rest.to(torch.int16)


def _gather_boxes(flat: Tensor, boxes: Sequence[Tensor]) -> None:
    """Fill `flat` with the loaded boxes, which follow one another in it; most were read in place."""
    place = 0
    for box in boxes:
        target = flat[place : place + box.numel()]
        if target.data_ptr() != box.data_ptr():
            target.copy_(box.reshape(-1))
        place += box.numel()


def _owned(part: DistributedOptimizer) -> Iterator[tuple[Tensor, int]]:
    """The parameters of which this rank owns elements, and the first of these in the flat parameter."""
    for by_dtype in part.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start


def cut(entry: _Entry, key: str, flat: Tensor, begin: int, replica: tuple[int, ...]) -> list[ShardedTensor]:
    """The blocks to store for elements `begin` and following of the flattened parameter of `entry`.

    `flat` [elements] holds the values, and the result's tensors are views of it, in its order. Raises ValueError if the
    parameter is not stored as ranges of its elements.
    """
    blocks = _blocks(entry, key, flat.dtype, replica)
    if blocks is None:
        raise ValueError(f"{key} is not stored as ranges of its elements")
    cuts = []
    for block in sorted(blocks, key=lambda block: int(block.data.storage_offset())):
        first = block.data.storage_offset()
        low, high = max(begin, first), min(begin + len(flat), first + block.data.numel())
        place = low - begin
        for offsets, sizes in boxes(block.local_shape, low - first, high - first):
            count = math.prod(sizes)
            cuts.append(_box(block, offsets, sizes, flat[place : place + count]))
            place += count
    return cuts


def _box(block: ShardedTensor, offsets: tuple[int, ...], sizes: tuple[int, ...], values: Tensor) -> ShardedTensor:
    """The part of `block` at `offsets`; axes that megatron-core prepends become ordinary ones of length 1."""
    front = block.prepend_axis_num
    starts = zip(block.global_offset[front:], offsets, strict=True)
    shape = (1,) * front + sizes
    return dataclasses.replace(
        block,
        data=values.view(shape),
        local_shape=shape,
        global_offset=(*block.global_offset[:front], *(first + offset for first, offset in starts)),
        axis_fragmentations=None,  # not a regular grid
        prepend_axis_num=0,
    )


def _blocks(entry: _Entry, key: str, dtype: torch.dtype, replica: Any) -> list[ShardedTensor] | None:
    """The stored blocks of the whole parameter of `entry`, with views of a tensor without memory as their data.

    None unless they are ranges of the flattened parameter that cover it.
    """
    whole = torch.empty(entry.data.shape, dtype=dtype, device="meta")
    if isinstance(entry, ShardedTensor):
        return [dataclasses.replace(entry, key=key, data=whole, dtype=dtype, replica_id=replica)]
    built = dataclasses.replace(entry, key=key, data=whole, replica_id=replica).build()
    blocks = [built] if isinstance(built, ShardedTensor) else list(nested_values(built))
    memory = whole.untyped_storage()._cdata
    ranges = all(block.data.untyped_storage()._cdata == memory and block.data.is_contiguous() for block in blocks)
    return blocks if ranges and sum(block.data.numel() for block in blocks) == whole.numel() else None


def boxes(shape: Sequence[int], low: int, high: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements `low` to `high` of a flattened tensor of `shape` as boxes (offsets, sizes), in order.

    None for an empty range; the range must be inside the tensor.
    """
    if low >= high:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-low // row), high // row  # whole rows
    if first > last:  # inside one row
        yield from _in_row(shape, last, low % row, high % row)
        return
    if low % row:
        yield from _in_row(shape, first - 1, low % row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if high % row:
        yield from _in_row(shape, last, 0, high % row)


def _in_row(shape: Sequence[int], row: int, low: int, high: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in boxes(shape[1:], low, high):
        yield (row, *offsets), (1, *sizes)


def sync_step_count(saved: dict[Any, Any], own_steps: set[float]) -> None:
    """Set the correct step count in all parts of an optimizer's state before saving, in place; collective.

    Rank 0's count is stored, but rank 0 may have none of the parameters. `own_steps` are the counts of this rank's
    parameters. Does nothing if no rank has such counts. Raises ValueError, on every rank, if the counts differ.
    """
    everyones: list[set[float]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everyones, own_steps)
    steps = set().union(*everyones)
    if len(steps) > 1:
        raise ValueError(f"parameters have step counts {sorted(steps)}: saving needs the same count for all")
    for part in saved_parts(saved) if steps else ():
        for group in part["param_groups"]:
            if "step" in group:  # the distributed optimizer's place for it
                group["step"] = max(steps)
        if "state" in part and max(steps) > 0:  # the other optimizers'
            part["state"]["common_step"] = torch.tensor(max(steps))


def saved_parts(saved: Any) -> Iterator[dict[str, Any]]:
    """The state of each part with an Adam; several parts are stored under their numbers."""
    if not isinstance(saved, dict):
        return
    if "param_groups" in saved:
        if any("betas" in group for group in saved["param_groups"]):
            yield saved
        return
    for key, value in saved.items():
        if isinstance(key, int) or key == "optimizer":
            yield from saved_parts(value)


@torch.no_grad()
def after_hybrid_load(hybrid: HybridDeviceOptimizer) -> None:
    """Give each weight its own step counter, and undo the step that a part may have taken to create its state."""
    for state in hybrid.state.values():
        state["step"] = state["step"].detach().clone()
    for weight, master in hybrid.param_to_fp32_param.items():
        weight.copy_(master)


def after_load(optimizer: MegatronOptimizer) -> None:
    """Give every parameter its own step counter again; call after `optimizer.load_state_dict`.

    megatron-core's distributed optimizer hands one tensor to all parameters, and AdamW then advances it once per
    parameter: 2 becomes 20 in one step, silently.
    """
    for part in parts_of(optimizer, torch.optim.Adam):
        for state in part.optimizer.state.values():
            step = state.get("step")
            state["step"] = torch.tensor(0.0) if step is None else step.detach().clone()
    for part in hybrid_parts(optimizer):
        after_hybrid_load(part.optimizer)


def step_counts(optimizer: MegatronOptimizer) -> set[float]:
    """The distinct step counters over all parameters; more than one is an error.

    Ignores parameters without a part on this rank, which are not stepped here, and those with a counter in their group.
    """
    return {
        float(state["step"])
        for part in (*parts_of(optimizer, torch.optim.Adam), *hybrid_parts(optimizer))
        for parameter, state in part.optimizer.state.items()
        if (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel() and "step" in state
    }


def parts_of(optimizer: MegatronOptimizer, *kinds: type[torch.optim.Optimizer]) -> Iterator[Any]:
    """The megatron-core optimizers inside `optimizer` that step with one of these (not with Apex' or TE's)."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, kinds):
            yield part


def hybrid_parts(optimizer: MegatronOptimizer) -> Iterator[Any]:
    """Those that step in host memory."""
    return parts_of(optimizer, HybridDeviceOptimizer)


def convert_step_format(loaded: dict[Any, Any], optimizer: MegatronOptimizer) -> None:
    """Convert `loaded`, a checkpoint's state of `optimizer`, to the format of its Adam; in place.

    Raises ValueError if the parts of the optimizer have different step counts.
    """
    inner = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    adam = next((one for one in inner if one is not None and "betas" in one.defaults), None)  # None: trains nothing
    if adam is None or isinstance(adam, HybridDeviceOptimizer):  # the latter takes either form
        return
    parts = list(saved_parts(loaded))
    steps = {float(step) for part in parts for step in _steps(part)}
    if len(steps) > 1:
        raise ValueError(f"the parts of the saved optimizer have step counts {sorted(steps)}: save them together")
    if not steps:  # saved before the first step
        return
    (step,) = steps
    for part in parts:
        if isinstance(adam, torch.optim.Adam):
            _count_per_parameter(part, step)
        else:
            _count_per_group(part, int(step), adam.defaults)


def _steps(part: dict[str, Any]) -> list[Any]:
    """Every step count in the state of a part."""
    counted = [group["step"] for group in part["param_groups"] if group.get("step") is not None]
    return counted + ([part["state"]["common_step"]] if "common_step" in part.get("state", {}) else [])


def _count_per_parameter(part: dict[str, Any], step: float) -> None:
    if "state" in part:
        part["state"]["common_step"] = torch.tensor(step)
    for group in part["param_groups"]:
        group.pop("step", None)
        if "state" not in part:  # the distributed optimizer copies the group's count to the parameters
            group["step"] = step


def _count_per_group(part: dict[str, Any], step: int, defaults: dict[str, Any]) -> None:
    for group in part["param_groups"]:
        for name, value in defaults.items():
            group.setdefault(name, value)
        group["step"] = step
    part.get("state", {}).pop("common_step", None)
