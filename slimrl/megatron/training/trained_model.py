"""A model in training on one rank: which weights are trained, gradient buffers, optimizer, schedule, guard against bad
steps.

The policy and, with PPO, the critic are each one. Collective: every rank makes the same calls in the same order.

--only-train-params-name-list and --freeze-params-name-list select the same weights in every parallel layout; a pattern
that matches nothing is an error. Frozen weights have no gradient buffer and no optimizer state, and do not count in the
gradient norm; they are saved and sent to the engines like any other weight.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor, nn

from slimrl.arguments import Arguments
from slimrl.arguments.flags.algorithm import AlgorithmArguments
from slimrl.megatron import config, data_parallel
from slimrl.megatron.checkpoint.state import TrainingState
from slimrl.megatron.data_parallel import ShardedReference, Stage
from slimrl.megatron.optimizer import build_optimizer
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.ref_model import ReferenceWeights
from slimrl.megatron.training.nonfinite_guard import NonFiniteGuard
from slimrl.weights.reshard import global_tensors, listed


@dataclasses.dataclass
class TrainedModel:
    """`stages` are the unwrapped models of this rank: one, or one per virtual pipeline stage."""

    stages: list[GPTModel]
    wrapped: list[Stage]  # the same in their gradient-reducing wrappers
    reference: ReferenceWeights | ShardedReference | None  # other weights of the same model
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    guard: NonFiniteGuard

    @classmethod
    def build(
        cls,
        args: Arguments,
        stages: list[GPTModel],
        parallel: ParallelState,
        reference: ReferenceWeights | None = None,
        untrained_rollouts: int = 0,
    ) -> TrainedModel:
        """Wraps `stages`, whose weights are loaded, and makes the optimizer of `args`.

        The schedule leaves out `untrained_rollouts`, in which this model takes no step.
        """
        wrapped = data_parallel.wrap(config.ddp_config(args), stages, parallel.device)
        sharded = data_parallel.shard_reference(reference, wrapped)
        data_parallel.install_sync_funcs(wrapped)
        optimizer = build_optimizer(config.optimizer_config(args), wrapped)
        data_parallel.all_gather_params(wrapped)
        stages[0].config.grad_scale_func = optimizer.scale_loss
        scheduler = config.parameter_scheduler(
            args,
            optimizer,
            num_rollout=None if args.num_rollout is None else args.num_rollout - untrained_rollouts,
            num_steps_per_rollout=args.num_steps_per_rollout,
        )
        guard = NonFiniteGuard(args, optimizer, stages, parallel)
        return cls(stages, wrapped, sharded, optimizer, scheduler, guard)

    def training_state(self, parallel: ParallelState, trained_weights: str) -> TrainingState:
        """What a checkpoint saves and restores; `trained_weights` are the flags that selected them."""
        return TrainingState(self.stages, self.optimizer, self.scheduler, parallel, trained_weights)

    def begin_step(self) -> None:
        """Before the passes of an optimizer step: gradients are zero afterwards."""
        self.guard.begin()
        # Both are needed: the first clears the reduction buffers, the second the gradients of the parameters.
        for stage in self.wrapped:
            stage.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self, loss: float, where: str, broken_inputs: Callable[[], list[str]]) -> dict[str, float]:
        """Take the optimizer step if all values are finite (see `NonFiniteGuard`).

        Returns learning rates, gradient norm, and whether the step was skipped. Raises FloatingPointError.
        """
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        taken, norm = self.guard.step(loss, where, broken_inputs)
        if taken:
            self.scheduler.step(1)
        metrics = {f"lr-pg_{number}": rate for number, rate in enumerate(rates)}
        return metrics | {"grad_norm": norm, "lr": rates[0], "skipped": float(not taken)}


_ONLY = "--only-train-params-name-list"
_FREEZE = "--freeze-params-name-list"


def freeze_parameters(algorithm: AlgorithmArguments, stages: Sequence[GPTModel]) -> None:
    """Freeze weights by the two lists; collective over all ranks.

    A pattern is searched (`re.search`) in a weight's Megatron name with global layer and expert numbers, for example
    `decoder.layers.3.mlp.linear_fc1.weight`. A head tied to the embedding is `embedding.word_embeddings.weight` on
    every stage. Raises ValueError, on every rank, for a pattern that matches no name or if no weight is left to train.
    """
    flag, patterns = _list(algorithm)
    if patterns:
        named = list(_named_parameters(stages))
        for name, parameter in named:
            found = any(re.search(pattern, name) for pattern in patterns)
            parameter.requires_grad_(found == (flag == _ONLY))
        _check_effect(flag, patterns, named)
    for stage in stages:  # a custom model may be frozen without a list
        _keep_the_graph(stage)


def describe_trained_parameters(algorithm: AlgorithmArguments) -> str:
    """The flag that selected the trained weights, as typed; for messages and to compare two runs."""
    flag, patterns = _list(algorithm)
    return " ".join((flag, *patterns)) if patterns else "every weight trained"


def _list(algorithm: AlgorithmArguments) -> tuple[str, list[str]]:
    only = algorithm.only_train_params_name_list
    return (_FREEZE, algorithm.freeze_params_name_list or []) if only is None else (_ONLY, only)


def _named_parameters(stages: Sequence[GPTModel]) -> Iterator[tuple[str, nn.Parameter]]:
    """This rank's parameters by their global names."""
    tied = stages[0].share_embeddings_and_output_weights
    for name, tensor in global_tensors(stages).items():
        if isinstance(tensor, nn.Parameter):
            yield ("embedding.word_embeddings.weight" if tied and name == "output_layer.weight" else name), tensor


def _check_effect(flag: str, patterns: Sequence[str], named: Sequence[tuple[str, nn.Parameter]]) -> None:
    own = (
        [any(re.search(pattern, name) for name, _ in named) for pattern in patterns],
        any(parameter.requires_grad for _, parameter in named),
    )
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    for number, pattern in enumerate(patterns):
        if not any(found[number] for found, _ in ranks):
            names = listed(name for name, _ in named)
            raise ValueError(
                f"{flag} {pattern!r} matches no weight's name; the names are {names}: fix the regular expression or"
                " leave it out"
            )
    if not any(trains for _, trains in ranks):
        raise ValueError(f"{flag} {' '.join(patterns)} leaves no weight to train: freeze fewer weights")


def _keep_the_graph(stage: GPTModel) -> None:
    """Recomputed blocks have gradients only if their input has one; a frozen embedding would disable all of them."""
    embedding_is_frozen = stage.pre_process and not any(p.requires_grad for p in stage.embedding.parameters())
    if embedding_is_frozen and stage.config.recompute_granularity is not None:
        stage.embedding.register_forward_hook(_require_gradient)


def _require_gradient(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.requires_grad_()
