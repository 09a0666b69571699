"""Builds a training rank's optimizer, and fixes how megatron-core 0.16.1 saves and loads the state of torch's AdamW.

The state is complete before the first step, has one step counter per parameter, and is exact after loading. Muon
(`muon`) is chained with an Adam.

A part without parameters on this rank (the experts' part on a stage of dense layers) can be saved and loaded;
megatron-core reads the step counter from the parameters and fails without any. With --optimizer-cpu-offload the saved
state holds plain data only, and loading it leaves the weights as they are.

`fit` converts between torch's AdamW and the fused Adam of Transformer Engine or Apex: torch counts steps per parameter,
the fused ones per parameter group. Step count and moments stay the same, whichever implementation saved them.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed.tensor import DTensor

from slimrl.megatron import data_parallel
from slimrl.megatron.checkpoint.shards import store_without_gathering
from slimrl.megatron.muon import build_muon

_STAND_IN = "no parameter on this rank"


def pad_empty_adam_state(adam: torch.optim.Adam) -> None:
    """Make a distributed optimizer's `adam` without parameters report a step counter of 0, and ignore a loaded one."""
    if any(group["params"] for group in adam.param_groups):
        return

    def show(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict["state"] = {_STAND_IN: {"step": torch.tensor(0.0)}}

    def forget(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "state": {}}

    adam.register_state_dict_post_hook(show)
    adam.register_load_state_dict_pre_hook(forget)


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


# settings in its parameter groups, including classes: those of the running job apply
_NOT_STATE = (
    "offload_fraction",
    "cpu_optimizer_cls",
    "gpu_optimizer_cls",
    "param_update_in_fp32",
    "pin_cpu_grads",
    "pin_cpu_params",
    "overlap_cpu_optimizer_d2h_h2d",
)


def torch_adams(hybrid: HybridDeviceOptimizer) -> list[torch.optim.Adam]:
    """The torch optimizers inside: all on the host; on the device only without Transformer Engine and Apex."""
    return [adam for adam in hybrid.sub_optimizers if isinstance(adam, torch.optim.Adam)]


def check_device_part(part: torch.optim.Optimizer | None, fraction: float) -> None:
    """Raises ValueError if torch's Adam would step on a GPU, for the `part` of the state that is not in host memory.

    Its fused kernel reads step counters on the GPU, and megatron-core keeps them, and after a resume the moments, on
    the host.
    """
    if isinstance(part, torch.optim.Adam) and any(
        parameter.device.type != "cpu" for group in part.param_groups for parameter in group["params"]
    ):
        raise ValueError(
            f"--optimizer-offload-fraction {fraction:g} leaves a part of the optimizer on the GPU, for which"
            " Transformer Engine or Apex is needed and neither is installed: install one, or give 1"
        )


def show_state(hybrid: HybridDeviceOptimizer) -> None:
    """Make `hybrid` return the state created in its parts, unless a part creates its state in its first step."""
    if len(torch_adams(hybrid)) == len(hybrid.sub_optimizers):
        hybrid._sync_sub_optimizers_state_to_hdo()


def save_plain_data(part: DistributedOptimizer) -> None:
    """Omit settings from the state of `part`, whose optimizer is hybrid."""
    whole = part.state_dict

    def state_dict(self: DistributedOptimizer) -> dict[str, Any]:
        state = whole()
        for group in state["optimizer"]["param_groups"]:
            for name in _NOT_STATE:
                group.pop(name, None)  # after loading they are absent
        return state

    part.state_dict = types.MethodType(state_dict, part)


@torch.no_grad()
def after_hybrid_load(hybrid: HybridDeviceOptimizer) -> None:
    """Give each weight its own step counter, and undo the step that a part may have taken to create its state."""
    for state in hybrid.state.values():
        state["step"] = state["step"].detach().clone()
    for weight, master in hybrid.param_to_fp32_param.items():
        weight.copy_(master)


def build_optimizer(config: OptimizerConfig, stages: Sequence[data_parallel.Stage]) -> MegatronOptimizer:
    """The optimizer over the parameters of this rank's `stages`; biases and norms are exempt from weight decay."""
    overrides = get_standard_config_overrides(config)
    if config.optimizer == "muon":
        optimizer = build_muon(config, stages, overrides)
    else:
        optimizer = get_megatron_optimizer(config, list(stages), overrides, use_gloo_process_groups=False)
    if any(isinstance(stage, FullyShardedDataParallel) for stage in stages):
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            _prime(part.optimizer)
            data_parallel.patch_fsdp_state_dict(part)
        return optimizer
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, DistributedOptimizer):
            store_without_gathering(part)
    for part in _parts_of(optimizer, torch.optim.Adam, torch.optim.SGD):
        _prime(part.optimizer)
        part.init_state_fn = part.init_state_fn or (lambda *_: None)  # megatron-core has none for SGD, and calls it
        if isinstance(part, DistributedOptimizer):
            pad_empty_adam_state(part.optimizer)
            part._set_main_param_and_optimizer_states = types.MethodType(_copy_loaded_states, part)
    for part in _hybrid_parts(optimizer):
        check_device_part(part.optimizer.gpu_optimizer, config.optimizer_offload_fraction)
        for adam in torch_adams(part.optimizer):
            _prime(adam)
        show_state(part.optimizer)
        save_plain_data(part)
    return optimizer


def after_load(optimizer: MegatronOptimizer) -> None:
    """Give every parameter its own step counter again; call after `optimizer.load_state_dict`.

    megatron-core's distributed optimizer hands one tensor to all parameters, and AdamW then advances it once per
    parameter: 2 becomes 20 in one step, silently.
    """
    for part in _parts_of(optimizer, torch.optim.Adam):
        for state in part.optimizer.state.values():
            step = state.get("step")
            state["step"] = torch.tensor(0.0) if step is None else step.detach().clone()
    for part in _hybrid_parts(optimizer):
        after_hybrid_load(part.optimizer)


def step_counts(optimizer: MegatronOptimizer) -> set[float]:
    """The distinct step counters over all parameters; more than one is an error.

    Ignores parameters without a part on this rank, which are not stepped here, and those with a counter in their group.
    """
    return {
        float(state["step"])
        for part in (*_parts_of(optimizer, torch.optim.Adam), *_hybrid_parts(optimizer))
        for parameter, state in part.optimizer.state.items()
        if (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel() and "step" in state
    }


def _parts_of(optimizer: MegatronOptimizer, *kinds: type[torch.optim.Optimizer]) -> Iterator[Any]:
    """The megatron-core optimizers inside `optimizer` that step with one of these (not with Apex' or TE's)."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, kinds):
            yield part


def _hybrid_parts(optimizer: MegatronOptimizer) -> Iterator[Any]:
    """Those that step in host memory."""
    return _parts_of(optimizer, HybridDeviceOptimizer)


def _prime(inner: torch.optim.Optimizer) -> None:
    """Create the states that Adam and SGD create in their first step: saving and loading expect them to exist."""
    counted = isinstance(inner, torch.optim.Adam)
    for group in inner.param_groups:
        moments = ("exp_avg", "exp_avg_sq") if "betas" in group else ("momentum_buffer",) * bool(group["momentum"])
        for parameter in group["params"]:
            if not inner.state[parameter]:
                step = {"step": torch.tensor(0.0)} if counted else {}
                inner.state[parameter] = step | {name: torch.zeros_like(parameter) for name in moments}


@torch.no_grad()
def _copy_loaded_states(self: DistributedOptimizer, model_parameter: Tensor, tensors: dict[str, Tensor]) -> None:
    """Copy a checkpoint's state of one parameter; the original also expects `step`, which is stored elsewhere."""
    group, order = self.model_param_group_index_map[model_parameter]
    main_parameter = self.optimizer.param_groups[group]["params"][order]
    targets = {"param": main_parameter, **self.optimizer.state[main_parameter]}
    for name, value in tensors.items():
        if name != "step":
            targets[name].copy_(value)


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
