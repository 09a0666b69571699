"""A model in training on one rank: gradient buffers, optimizer, schedule, and the guard against bad steps.

The policy and, with PPO, the critic are each one. Collective: every rank makes the same calls in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slimrl.arguments import Arguments
from slimrl.megatron import config, data_parallel
from slimrl.megatron.checkpoint.state import TrainingState
from slimrl.megatron.data_parallel import ShardedReference, Stage
from slimrl.megatron.optimizer import build_optimizer
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.ref_model import ReferenceWeights
from slimrl.megatron.training.nonfinite_guard import NonFiniteGuard


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
