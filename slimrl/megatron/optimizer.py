"""The optimizer of a training worker, and the mends it needs where AdamW is torch's own.

Promises that state saved, loaded and stepped on means the same everywhere: complete before the first step, one
step counter per parameter, exact after loading. Called by the trainer and by `checkpoint`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed.tensor import DTensor

from slimrl.arguments import Arguments
from slimrl.megatron import fsdp, hybrid_optimizer
from slimrl.megatron.config import optimizer_config
from slimrl.megatron.empty_parts import stand_in


def build_optimizer(args: Arguments, stages: Sequence[fsdp.Stage]) -> MegatronOptimizer:
    """The optimizer over the parameters of this rank's `stages`; biases and norms are exempt from weight decay."""
    config = optimizer_config(args)
    optimizer = get_megatron_optimizer(
        config, list(stages), get_standard_config_overrides(config), use_gloo_process_groups=False
    )
    if args.use_megatron_fsdp:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            _prime(part.optimizer)
            fsdp.save_like_the_distributed_optimizer(part)
        return optimizer
    for part in _torch_adam_parts(optimizer):
        _prime(part.optimizer)
        if isinstance(part, DistributedOptimizer):
            stand_in(part.optimizer)
            part._set_main_param_and_optimizer_states = types.MethodType(_copy_loaded_states, part)
    for part in _hybrid_parts(optimizer):
        for adam in hybrid_optimizer.torch_adams(part.optimizer):
            _prime(adam)
        hybrid_optimizer.show_state(part.optimizer)
        hybrid_optimizer.save_plain_data(part)
    return optimizer


def finish_loading(optimizer: MegatronOptimizer) -> None:
    """Give every parameter its own step counter again; call after `optimizer.load_state_dict`.

    megatron-core's distributed optimizer hands one tensor to all parameters, and AdamW then advances it once per
    parameter: 2 becomes 20 in one step, silently.
    """
    for part in _torch_adam_parts(optimizer):
        for state in part.optimizer.state.values():
            step = state.get("step")
            state["step"] = torch.tensor(0.0) if step is None else step.detach().clone()
    for part in _hybrid_parts(optimizer):
        hybrid_optimizer.finish_loading(part.optimizer)


def step_counts(optimizer: MegatronOptimizer) -> set[float]:
    """The distinct step counters over all parameters: one number, unless something is wrong.

    Parameters of which this rank has no part are not stepped here, and do not count; nor do those whose counter is in
    their group.
    """
    return {
        float(state["step"])
        for part in (*_torch_adam_parts(optimizer), *_hybrid_parts(optimizer))
        for parameter, state in part.optimizer.state.items()
        if (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel() and "step" in state
    }


def _torch_adam_parts(optimizer: MegatronOptimizer) -> Iterator[Any]:
    """The megatron-core optimizers inside `optimizer` that step with torch's AdamW (not Apex' or TE's)."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.Adam):
            yield part


def _hybrid_parts(optimizer: MegatronOptimizer) -> Iterator[Any]:
    """Those that step in host memory."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            yield part


def _prime(adam: torch.optim.Optimizer) -> None:
    """Create the states that Adam makes in its first step: saving and loading expect them to exist."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            if not adam.state[parameter]:
                step = {"step": torch.tensor(0.0)} if isinstance(adam, torch.optim.Adam) else {}
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[parameter] = step | moments


@torch.no_grad()
def _copy_loaded_states(self: DistributedOptimizer, model_parameter: Tensor, tensors: dict[str, Tensor]) -> None:
    """Copy what a checkpoint holds for one parameter; the original also looks for `step`, which is kept elsewhere."""
    group, order = self.model_param_group_index_map[model_parameter]
    main_parameter = self.optimizer.param_groups[group]["params"][order]
    targets = {"param": main_parameter, **self.optimizer.state[main_parameter]}
    for name, value in tensors.items():
        if name != "step":
            targets[name].copy_(value)
