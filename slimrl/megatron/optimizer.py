"""Builds a training rank's optimizer: Adam, SGD, or Muon for the matrices, chained with Adam for all other weights.

Its state is complete before the first step. A part without parameters on this rank (the experts' part on a stage of
dense layers) can be saved and loaded; megatron-core 0.16.1 reads the step counter from the parameters and fails without
any. With --optimizer-cpu-offload the saved state holds plain data only, and loading it leaves the weights as they are.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
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

from slimrl.megatron import data_parallel
from slimrl.megatron.checkpoint.optimizer_state import hybrid_parts, parts_of, store_without_gathering
from slimrl.megatron.muon import build_muon


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
    for part in parts_of(optimizer, torch.optim.Adam, torch.optim.SGD):
        _prime(part.optimizer)
        part.init_state_fn = part.init_state_fn or (lambda *_: None)  # megatron-core has none for SGD, and calls it
        if isinstance(part, DistributedOptimizer):
            pad_empty_adam_state(part.optimizer)
            part._set_main_param_and_optimizer_states = types.MethodType(_copy_loaded_states, part)
    for part in hybrid_parts(optimizer):
        check_device_part(part.optimizer.gpu_optimizer, config.optimizer_offload_fraction)
        for adam in torch_adams(part.optimizer):
            _prime(adam)
        show_state(part.optimizer)
        save_plain_data(part)
    return optimizer


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
