"""Jobs that tests run inside the ranks: conversion, training, export. Each leaves torch.distributed closed."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from slimrl.arguments import Arguments
from slimrl.data.batch_schedule import schedule_batch
from slimrl.data.train_batch import RolloutBatch
from slimrl.platform.launch_env import DETERMINISTIC


@dataclasses.dataclass
class StepResult:
    """Rank 0's result of training on one rollout."""

    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]  # by Hugging Face name, unsharded
    gradients: dict[str, Tensor]  # of the last step, clipped, by Hugging Face name
    progress: list[tuple[int, int]]  # progress reports during training
    main_weights: dict[str, Tensor] | None  # the fp32 copies of bf16 weights; None if no rank has the full tensors


def _model_type(args: Arguments) -> str:
    if args.multi_latent_attention:
        return "deepseek_v3"
    return "qwen3" if args.num_experts is None else "qwen3_moe"


def family_of(args: Arguments) -> Any:
    """The mapping of the model that `args` describe."""
    from slimrl.models.families import family_for
    from slimrl.weights.hf_checkpoint import read_hf_config

    folder = args.vision_folder
    return family_for({"model_type": _model_type(args)} if folder is None else read_hf_config(Path(folder)))


def convert(rank: int, world_size: int, init_method: str, args: Arguments, hf_dir: Path, target: Path) -> None:
    """Hugging Face folder to torch_dist checkpoint."""
    from slimrl.megatron import parallel
    from slimrl.megatron.checkpoint import state as checkpoint
    from slimrl.megatron.model import model_builder
    from slimrl.models.families import family_for
    from slimrl.models.model_spec import ModelSpec
    from slimrl.weights.convert.hf_to_megatron import load_hf_checkpoint

    state = parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    built = model_builder.build_model(args, state, model_builder.CustomModel.from_args(args))
    family = family_for({"model_type": _model_type(args)})
    shape = ModelSpec.from_args(args)
    load_hf_checkpoint(built, shape, family, hf_dir, tp_rank=state.tp_rank, tp_size=state.tp_size)
    checkpoint.save_model_only(built, target)
    parallel.shutdown()


def export(trainer: Any, what: str = "data", family: Any = None) -> dict[str, Tensor]:
    """The trainer's full weights, or their "main_grad" or "main_param", by Hugging Face name; collective.

    `family` defaults to that of the tiny models.
    """
    from slimrl.models.model_spec import ModelSpec
    from slimrl.weights.update.export import iter_hf_tensors

    parameters = [parameter for stage in trainer.stages for parameter in stage.parameters()]
    own = [parameter.data for parameter in parameters]
    for parameter in parameters:
        frozen = what == "main_grad" and not parameter.requires_grad
        parameter.data = parameter.new_zeros(parameter.shape) if frozen else getattr(parameter, what).clone()
    parallel = trainer.parallel
    pieces = iter_hf_tensors(
        trainer.stages,
        ModelSpec.from_args(trainer.hook_args),
        family or family_of(trainer.hook_args),
        parallel.tp_group,
        pp_group=parallel.pp_group,
        ep_group=parallel.ep_group,
        etp_group=parallel.etp_group,
    )
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in pieces}
    if what == "main_grad":  # this buffer is exported among the weights and has none
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("e_score_correction_bias")}
    for parameter, data in zip(parameters, own, strict=True):
        parameter.data = data
    return tensors


def gradients(trainer: Any) -> dict[str, Tensor]:
    """The full gradients of the last step by Hugging Face name; empty with Megatron-FSDP, which keeps none."""
    return {} if trainer.hook_args.use_megatron_fsdp else export(trainer, "main_grad")


def start(rank: int, world_size: int, init_method: str, args: Arguments, **more: Any) -> Any:
    """Builds a trainer."""
    if args.deterministic_mode:  # a run starts its ranks with them; on a GPU cuBLAS and Transformer Engine ask for them
        os.environ.update(DETERMINISTIC)
    from slimrl.megatron.training.trainer import MegatronTrainer

    return MegatronTrainer(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method, **more)


def share_of(trainer: Any, rollout: RolloutBatch) -> RolloutBatch:
    """The trainer's part of a rollout, with the schedule of its flags."""
    return part_of(trainer.hook_args, trainer.parallel, rollout)


def part_of(args: Arguments, parallel: Any, rollout: RolloutBatch) -> RolloutBatch:
    """The part of the data-parallel rank that `parallel` describes."""
    size = parallel.dp_size
    return schedule_batch(
        rollout,
        data_parallel_size=size,
        context_parallel_size=args.context_parallel_size,
        micro_batch_group=args.microbatch_group_size_per_vp_stage or 1,
        global_batch_size=len(rollout) // args.num_steps_per_rollout,
        micro_batch_size=args.micro_batch_size,
        max_tokens_per_micro_batch=args.max_tokens_per_gpu if args.use_dynamic_batch_size else None,
        balance=args.balance_data,
        samples_together=args.samples_together,
    )[parallel.dp_rank]


def train_once(
    rank: int, world_size: int, init_method: str, args: Arguments, rollout: RolloutBatch
) -> StepResult | list[dict[str, float]]:
    """Trains on one rollout; rank 0 returns everything, the others their metrics."""
    progress = []
    trainer = start(rank, world_size, init_method, args, on_progress=lambda *now: progress.append(now))
    metrics = trainer.train(0, share_of(trainer, rollout))
    main_weights = export(trainer, "main_param") if args.bf16 and not args.use_distributed_optimizer else None
    result = StepResult(metrics, export(trainer), gradients(trainer), progress, main_weights)
    trainer.close()
    return result if rank == 0 else metrics


def train_each(
    rank: int, world_size: int, init_method: str, runs: list[tuple[Arguments, RolloutBatch]]
) -> list[StepResult | list[dict[str, float]]]:
    """`train_once` of every run, one after the other in the same ranks."""
    return [train_once(rank, world_size, f"{init_method}-{number}", *run) for number, run in enumerate(runs)]


def evaluate_and_train(
    rank: int, world_size: int, init_method: str, args: Arguments, rollout: RolloutBatch
) -> tuple[dict[str, float], dict[str, float], dict[str, float], dict[str, float]]:
    """Metrics of an evaluation of the rollout, of its one optimizer step, of an evaluation after it; of the rollout."""
    trainer = start(rank, world_size, init_method, args)
    share = share_of(trainer, rollout)
    before = trainer.held_out.evaluate(share)
    (trained,) = trainer.train(0, share)
    speeds = trainer.rollout_metrics
    after = trainer.held_out.evaluate(share)
    trainer.close()
    return before, trained, after, speeds


def local_state(model: Any) -> dict[str, Tensor]:
    """Every tensor of this rank that affects training; `model` has stages and optimizer."""
    tensors = {}
    for number, stage in enumerate(model.stages):
        named = (*stage.named_parameters(), *stage.named_buffers())
        tensors |= {f"weight {number} {name}": value.detach().clone() for name, value in named}
    for part, optimizer in enumerate(getattr(model.optimizer, "chained_optimizers", [model.optimizer])):
        for index, (parameter, state) in enumerate(optimizer.optimizer.state.items()):
            if local_part(parameter).numel():  # Megatron-FSDP counts the steps of empty parts or does not
                tensors[f"main parameter {part} {index}"] = parameter.detach().clone()
                tensors |= {f"{key} {part} {index}": value.clone() for key, value in state.items()}
    return {name: local_part(value) for name, value in tensors.items()}


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor of Megatron-FSDP; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def critic_state(trainer: Any) -> dict[str, Tensor]:
    """The same of its critic; empty without one."""
    if trainer._critic is None:
        return {}
    return {f"critic {name}": value for name, value in local_state(trainer._critic.model).items()}


# recomputable part of the model -> suffixes of the modules that its computation calls
_PARTS = {
    "core_attn": "self_attention.core_attention",
    "mlp": "layers.0.mlp",
    "layernorm": "input_layernorm",
    "moe": "mlp.router",
    "shared_experts": "mlp.shared_experts",
    "mla_up_proj": "linear_kv_up_proj",
}


def count_calls(rank: int, world_size: int, init_method: str, args: Arguments, rollout: RolloutBatch) -> dict[str, int]:
    """How often each part of the model is computed while training on a rollout."""
    trainer = start(rank, world_size, init_method, args)
    calls = dict.fromkeys(_PARTS, 0)

    def count(part: str, *_: Any) -> None:
        calls[part] += 1

    for stage in trainer.stages:
        for name, module in stage.named_modules():
            for part, end in _PARTS.items():
                if name.endswith(end):
                    module.register_forward_pre_hook(functools.partial(count, part))
    trainer.train(0, share_of(trainer, rollout))
    trainer.close()
    return calls
