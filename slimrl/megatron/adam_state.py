"""Loading the state of one implementation of Adam into another.

Promises that a run goes on with the same step count and moments whether torch's AdamW saved it or the fused one of
Transformer Engine or Apex, and whichever of them loads it. torch counts steps per parameter, the fused ones per
parameter group, and each expects its own settings in a group. Called by `checkpoint` before the optimizer loads.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from slimrl.megatron.empty_parts import saved_parts


def fit(loaded: dict[Any, Any], optimizer: MegatronOptimizer) -> None:
    """Give `loaded`, what a checkpoint holds for `optimizer`, the form that its Adam reads; in place.

    Raises ValueError where the parts of the optimizer were stepped differently often.
    """
    adams = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    adam = next((adam for adam in adams if adam is not None), None)  # None where this rank has nothing to train
    if adam is None or isinstance(adam, HybridDeviceOptimizer):  # the latter takes either form
        return
    parts = list(saved_parts(loaded))
    steps = {float(step) for part in parts for step in _steps(part)}
    if len(steps) > 1:
        raise ValueError(f"the parts of the saved optimizer were stepped {sorted(steps)} times: save them together")
    if not steps:  # saved before the first step
        return
    (step,) = steps
    for part in parts:
        if isinstance(adam, torch.optim.Adam):
            _count_per_parameter(part, step)
        else:
            _count_per_group(part, int(step), adam.defaults)


def _steps(part: dict[str, Any]) -> list[Any]:
    """Every count of steps in the state of a part."""
    counted = [group["step"] for group in part["param_groups"] if group.get("step") is not None]
    return counted + ([part["state"]["common_step"]] if "common_step" in part.get("state", {}) else [])


def _count_per_parameter(part: dict[str, Any], step: float) -> None:
    if "state" in part:
        part["state"]["common_step"] = torch.tensor(step)
    for group in part["param_groups"]:
        group.pop("step", None)
        if "state" not in part:  # the distributed optimizer hands the group's count to the parameters
            group["step"] = step


def _count_per_group(part: dict[str, Any], step: int, defaults: dict[str, Any]) -> None:
    for group in part["param_groups"]:
        for name, value in defaults.items():
            group.setdefault(name, value)
        group["step"] = step
    part.get("state", {}).pop("common_step", None)
