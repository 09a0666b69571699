"""The optimizer whose state lies in host memory (--optimizer-cpu-offload), and the mends that saving it needs.

Promises that its state is complete before the first step, and that a saved one holds plain data only and is read
without touching the weights. Called by `optimizer`.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

# settings that it keeps in its parameter groups, classes among them: those of the running job hold
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
    """Those inside that are torch's own: all on the host; on the device only without Transformer Engine and Apex."""
    return [adam for adam in hybrid.sub_optimizers if isinstance(adam, torch.optim.Adam)]


def show_state(hybrid: HybridDeviceOptimizer) -> None:
    """Have `hybrid` show the state that was made in its parts, unless a part makes its own in its first step."""
    if len(torch_adams(hybrid)) == len(hybrid.sub_optimizers):
        hybrid._sync_sub_optimizers_state_to_hdo()


def save_plain_data(part: DistributedOptimizer) -> None:
    """Leave settings out of the state of `part`, whose optimizer is hybrid."""
    whole = part.state_dict

    def state_dict(self: DistributedOptimizer) -> dict[str, Any]:
        state = whole()
        for group in state["optimizer"]["param_groups"]:
            for name in _NOT_STATE:
                group.pop(name, None)  # after loading they are not there
        return state

    part.state_dict = types.MethodType(state_dict, part)


@torch.no_grad()
def finish_loading(hybrid: HybridDeviceOptimizer) -> None:
    """Give each weight its own step counter, and take back the step that a part may have made to have a state."""
    for state in hybrid.state.values():
        state["step"] = state["step"].detach().clone()
    for weight, master in hybrid.param_to_fp32_param.items():
        weight.copy_(master)
