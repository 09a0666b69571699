"""Training hooks, which run on every rank.

--custom-megatron-init-path examples.training.prepare
--custom-megatron-before-log-prob-hook-path examples.training.check_weights
--custom-megatron-before-train-step-hook-path examples.training.rest
--rollout-data-postprocess-path examples.training.leave_out_sure_tokens
--custom-update-weight-post-write-path examples.training.keep_a_copy

`custom:` in --custom-config-path may set `steps_at_rest`, `sure` and `mirror`.
"""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slimrl.arguments import Arguments

logger = logging.getLogger(__name__)


def prepare(args: Arguments) -> None:
    """Limits each rank to one CPU thread, and logs the rank."""
    torch.set_num_threads(1)
    logger.info("rank %d of %d is ready", dist.get_rank(), dist.get_world_size())


def check_weights(args: Arguments, model: list[Any], store_prefix: str) -> None:
    """Raises ValueError if a weight of the model is not finite."""
    for name, weight in ((name, weight) for stage in model for name, weight in stage.named_parameters()):
        if not bool(weight.isfinite().all()):
            raise ValueError(f"{store_prefix or 'trained '}weight {name} is not finite")


def rest(args: Arguments, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, scheduler: Any) -> None:
    """Sets the learning rate of the run's first steps to 0: they only warm up Adam's moments."""
    if rollout_id * args.num_steps_per_rollout + step_id < args.custom.get("steps_at_rest", 0):
        for group in optimizer.param_groups:
            group["lr"] = 0.0


def leave_out_sure_tokens(args: Arguments, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Masks tokens whose probability is above `sure` (0.999)."""
    limit = math.log(args.custom.get("sure", 0.999))
    masks = zip(rollout_data["loss_masks"], rollout_data["log_probs"], strict=True)
    rollout_data["loss_masks"] = [mask * (log_probs <= limit) for mask, log_probs in masks]


def keep_a_copy(args: Arguments, version_dir: Path, rollout_engines: list[Any]) -> None:
    """Rank 0 copies every weight version to the folder `mirror`.

    A resumed run repeats versions: the new copy replaces the old one.
    """
    if dist.get_rank() == 0:
        copy = Path(args.custom["mirror"]) / version_dir.name
        if copy.exists():
            shutil.rmtree(copy)
        shutil.copytree(version_dir, copy)
