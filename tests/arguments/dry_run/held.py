"""Runs inside ranks for the test against a real trainer: builds a trainer and counts the bytes it holds."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from slimrl.arguments import Arguments


@dataclasses.dataclass
class Held:
    """Bytes of one rank, with the padding of Megatron's buffers; `tensors` are the weights' sizes in elements."""

    weights: int
    gradients: int
    optimizer: int
    dense: list[int]
    expert: list[int]


def held_bytes(rank: int, world_size: int, init_method: str, args: Arguments) -> Held:
    """Returns the bytes that one rank holds before its first step, of the critic if there is one."""
    from megatron.core.distributed import DistributedDataParallel

    from slimrl.megatron import config, parallel
    from slimrl.megatron.model import model_builder
    from slimrl.megatron.optimizer import build_optimizer
    from slimrl.megatron.training.trained_model import freeze_parameters

    if args.use_critic:
        args = dataclasses.replace(args, lora_rank=args.critic_lora_rank, lora_alpha=args.critic_lora_alpha)
    state = parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    build = model_builder.build_value_stages if args.use_critic else model_builder.build_stages
    stages = build(args, state)
    freeze_parameters(args, stages)
    wrapped = [DistributedDataParallel(stage.config, config.ddp_config(args), stage) for stage in stages]
    optimizer = build_optimizer(config.optimizer_config(args), wrapped)
    buffers = [buffer for stage in wrapped for buffer in (*stage.buffers, *stage.expert_parallel_buffers)]
    named = [pair for stage in stages for pair in stage.named_parameters()]
    held = Held(
        weights=_weight_bytes(buffers, [parameter for _, parameter in named]),
        gradients=sum(size_of(buffer.grad_data) for buffer in buffers),
        optimizer=_optimizer_bytes(optimizer, {parameter.data_ptr() for _, parameter in named}),
        dense=[parameter.numel() for name, parameter in named if ".experts." not in name],
        expert=[parameter.numel() for name, parameter in named if ".experts." in name],
    )
    parallel.shutdown()
    return held


def _weight_bytes(buffers: list[Any], parameters: list[Tensor]) -> int:
    """Bytes of the weights, with the padding of the buffers that a distributed optimizer keeps trained ones in."""
    kept = sum(size_of(buffer.param_data) for buffer in buffers if buffer.param_data is not None)
    return kept + sum(size_of(one) for one in parameters if not kept or not one.requires_grad)


def size_of(tensor: Tensor) -> int:
    """Bytes."""
    return tensor.numel() * tensor.element_size()


def _optimizer_bytes(optimizer: object, weights: set[int]) -> int:
    """Bytes of the moments and of the optimizer's float32 copies of weights. Step counters are excluded."""
    total = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is None:  # this rank has no share of these weights
            continue
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                total += size_of(state["exp_avg"]) + size_of(state["exp_avg_sq"])
                is_copy = part.config.bf16 or part.config.fp16
                total += size_of(parameter) if is_copy and parameter.data_ptr() not in weights else 0
    return total
