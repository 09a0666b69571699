"""Parts of an optimizer that have no parameter on this rank, as the experts' part on a stage of dense layers.

Promises that such a part can be saved and loaded where AdamW is torch's own: megatron-core 0.16.1 reads the step
counter off its parameters and stops where there are none. Called when the optimizer is built and when it is saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

_STAND_IN = "no parameter on this rank"


def stand_in(adam: torch.optim.Adam) -> None:
    """Have the `adam` of a distributed optimizer show a step counter of 0 where it has no parameters, and take none."""
    if any(group["params"] for group in adam.param_groups):
        return

    def show(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict["state"] = {_STAND_IN: {"step": torch.tensor(0.0)}}

    def forget(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "state": {}}

    adam.register_state_dict_post_hook(show)
    adam.register_load_state_dict_pre_hook(forget)


def agree_on_step(saved: dict[Any, Any], own_steps: set[float]) -> None:
    """Put the true step count into all parts of an optimizer's state to be saved, in place; collective.

    Rank 0's count is the one that is stored, and it may hold none of the parameters. `own_steps` are the counts of this
    rank's parameters. Nothing is done where no rank counts steps in this way. Raises ValueError, on every rank, where
    parameters were stepped differently often.
    """
    everyones: list[set[float]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everyones, own_steps)
    steps = set().union(*everyones)
    if len(steps) > 1:
        raise ValueError(f"parameters were stepped {sorted(steps)} times: to be saved all need the same count")
    for part in saved_parts(saved) if steps else ():
        for group in part["param_groups"]:
            if "step" in group:  # the distributed optimizer's place for it
                group["step"] = max(steps)
        if "state" in part and max(steps) > 0:  # the other optimizers'
            part["state"]["common_step"] = torch.tensor(max(steps))


def saved_parts(saved: Any) -> Iterator[dict[str, Any]]:
    """What each part's own Adam has to save; several parts stand under their numbers."""
    if not isinstance(saved, dict):
        return
    if "param_groups" in saved:
        yield saved
        return
    for key, value in saved.items():
        if isinstance(key, int) or key == "optimizer":
            yield from saved_parts(value)
