"""A model in training on one rank: which weights are trained, gradient buffers, optimizer, schedule, guard against bad
steps.

The policy and, with PPO, the critic are each one. Collective: every rank makes the same calls in the same order.

--only-train-params-name-list and --freeze-params-name-list select the same weights in every parallel layout; a pattern
that matches nothing is an error. Frozen weights have no gradient buffer and no optimizer state, and do not count in the
gradient norm; they are saved and sent to the engines like any other weight.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor, nn

from slimrl.arguments import Arguments
from slimrl.arguments.flags.algorithm import AlgorithmArguments
from slimrl.arguments.flags.optimizer import OptimizerArguments
from slimrl.megatron import config, data_parallel
from slimrl.megatron.checkpoint.state import TrainingState
from slimrl.megatron.data_parallel import ShardedReference, Stage
from slimrl.megatron.optimizer import build_optimizer
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.ref_model import BaseReference, ReferenceWeights
from slimrl.models.adapters import AdapterConfig, LoraFlags, is_adapter
from slimrl.models.families.param_mapping import VALUE_HEAD
from slimrl.processes.files import listed
from slimrl.weights.reshard import global_tensors

logger = logging.getLogger(__name__)

_SHOWN_SAMPLES = 8


class NonFiniteGuard:
    """Skips and counts bad steps. Call `begin` before backward, `step` after the reduction; collective, all ranks."""

    def __init__(
        self,
        flags: OptimizerArguments,
        optimizer: MegatronOptimizer,
        stages: Sequence[torch.nn.Module],
        parallel: ParallelState,
    ) -> None:
        self._ends_the_run = flags.check_for_nan_in_loss_and_grad
        self._most_in_a_row = flags.max_skipped_steps
        self._optimizer = optimizer
        self._parts = getattr(optimizer, "chained_optimizers", [optimizer])
        self._parallel = parallel
        # megatron-core updates these in the reduction, before it is known whether the step is taken
        self._biases = [
            buffer for stage in stages for name, buffer in stage.named_buffers() if name.endswith(".expert_bias")
        ]
        self._biases_before: list[Tensor] = []
        self._in_a_row = 0
        self.before_change: Callable[[], None] = lambda: None  # called before a step changes anything

    def begin(self) -> None:
        """Save the state that the backward pass itself changes."""
        self._biases_before = [bias.clone() for bias in self._biases]

    def step(self, loss: float, where: str, broken_inputs: Callable[[], list[str]]) -> tuple[bool, float]:
        """Whether the step was taken, and the gradient norm before clipping (NaN if it was not computed).

        `loss` is the step's, over all ranks; `where` names the step in messages; `broken_inputs` returns this rank's
        samples with non-finite inputs. With --fp16 an overflow that a smaller loss scale can fix only skips the step.
        Raises FloatingPointError for any other non-finite value, immediately or after --max-skipped-steps in a row.
        """
        scale = self._adaptive_scale()
        overflow, norm = False, math.nan
        if scale is not None:
            self.before_change()  # by an overflow
        if math.isfinite(loss) or not self._scales_loss():  # a smaller loss scale cannot fix a non-finite loss
            overflow = self._optimizer.prepare_grads()
            norm = math.inf if overflow else float(self._optimizer.get_grad_norm())
        if not self._on_any_rank(not (math.isfinite(loss) and math.isfinite(norm))):
            self.before_change()
            self._clip(norm)
            self._optimizer.step_with_ready_grads()
            self._in_a_row = 0
            return True, norm
        for bias, before in zip(self._biases, self._biases_before, strict=True):
            bias.copy_(before)
        if overflow and scale is not None:
            logger.info("%s: overflow with the loss scale %g; the step is skipped", where, scale)
        else:
            self._count(
                f"{where}: the loss is {loss:g} and the gradient norm is {norm:g}{self._blame(broken_inputs())}"
            )
        return False, norm

    def _count(self, what: str) -> None:
        self._in_a_row += 1
        if self._ends_the_run:
            raise FloatingPointError(
                f"{what}; the step was not taken. Resume from the last checkpoint with a lower"
                " --lr or without the samples of this rollout, or skip such steps with"
                " --no-check-for-nan-in-loss-and-grad"
            )
        if self._in_a_row >= self._most_in_a_row:
            raise FloatingPointError(
                f"{what}; {self._in_a_row} consecutive steps were not finite (--max-skipped-steps"
                f" {self._most_in_a_row}): the weights or the data are broken. Resume from an earlier checkpoint"
                " (--ckpt-step) with a lower --lr"
            )
        if self._parallel.rank == 0:
            logger.warning("%s: the step is skipped (%d in a row)", what, self._in_a_row)

    def _blame(self, broken_inputs: list[str]) -> str:
        """The samples of all ranks with non-finite inputs, as the end of a sentence."""
        of_ranks: list[list[str]] = [[] for _ in range(self._parallel.world_size)]
        dist.all_gather_object(of_ranks, broken_inputs)
        names = sorted({name for names in of_ranks for name in names})
        if not names:
            return ""
        more = f" and {len(names) - _SHOWN_SAMPLES} more" if len(names) > _SHOWN_SAMPLES else ""
        return f"; not finite before the step: {', '.join(names[:_SHOWN_SAMPLES])}{more}"

    def _scales_loss(self) -> bool:
        return any(_scaler(part) is not None for part in self._parts)

    def _adaptive_scale(self) -> float | None:
        """The loss scale if an overflow reduces it; None if it is fixed, at its minimum or absent."""
        scalers = [scaler for part in self._parts if isinstance(scaler := _scaler(part), DynamicGradScaler)]
        scales = [float(scaler.scale) for scaler in scalers if scaler.scale > scaler.min_scale]
        return min(scales, default=None)

    def _on_any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank; should be equal on all, but replicas would diverge if it were not."""
        value = torch.tensor(int(flag), dtype=torch.int32, device=self._parallel.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value)

    def _clip(self, norm: float) -> None:
        for part in self._parts:
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(
                    parameters,
                    max_norm=part.config.clip_grad,
                    total_norm=norm,
                    use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )


def _scaler(part: MegatronOptimizer) -> object | None:
    """The loss scaler of an optimizer; only those of mixed precision may have one."""
    return part.grad_scaler if isinstance(part, MixedPrecisionOptimizer) else None


def broken_samples(columns: dict[str, Tensor], loss_mask: Tensor, lengths: Tensor, ids: Tensor) -> list[str]:
    """ "sample 12 (advantages)" for every sample with a trained token whose value is not finite.

    `columns` and `loss_mask` are float [response tokens], `lengths` and `ids` int64 [samples].
    """
    owners = torch.repeat_interleave(ids, lengths)
    trained = loss_mask.cpu() != 0
    return [
        f"sample {sample} ({name})"
        for name, values in columns.items()
        for sample in owners[trained & ~values.cpu().isfinite()].unique().tolist()
    ]


@dataclasses.dataclass
class TrainedModel:
    """`stages` are the unwrapped models of this rank: one, or one per virtual pipeline stage."""

    stages: list[GPTModel]
    wrapped: list[Stage]  # the same in their gradient-reducing wrappers
    reference: ReferenceWeights | ShardedReference | BaseReference | None  # other weights of the same model
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    guard: NonFiniteGuard

    @classmethod
    def build(
        cls,
        args: Arguments,
        stages: list[GPTModel],
        parallel: ParallelState,
        reference: ReferenceWeights | BaseReference | None = None,
        untrained_rollouts: int = 0,
        *,
        updates_engines: bool = False,
    ) -> TrainedModel:
        """Wraps `stages`, whose weights are loaded, and makes the optimizer of `args`.

        The schedule leaves out `untrained_rollouts`, in which this model takes no step. With `updates_engines` its
        weights go to the engines, of which colocated ones without a GPU read them where they are.
        """
        wrapped = data_parallel.wrap(config.ddp_config(args), stages, parallel.device)
        maps = args.colocate and not args.debug_train_only and args.update_weight_transport == "nccl"
        if updates_engines and maps and parallel.device.type == "cpu":
            data_parallel.share_weights(wrapped)
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
    every stage. Of a model with adapters only these are trained. Raises ValueError, on every rank, for a pattern that
    matches no name or if no weight is left to train.
    """
    flag, patterns = _list(algorithm)
    _freeze_bases(stages)
    if patterns:
        named = list(_named_parameters(stages))
        for name, parameter in named:
            parameter.requires_grad_(algorithm.trains_weight(name))
        _check_effect(flag, patterns, named)
    for stage in stages:  # a custom model may be frozen without a list
        _keep_the_graph(stage)


def freeze_critic(stages: Sequence[GPTModel]) -> None:
    """Freeze the base of a critic's adapters, if it has any; the value head is trained."""
    _freeze_bases(stages)
    for stage in stages:
        _keep_the_graph(stage)


def _freeze_bases(stages: Sequence[GPTModel]) -> None:
    for stage in stages:
        if any(is_adapter(name) for name, _ in stage.named_parameters()):
            for name, parameter in stage.named_parameters():
                parameter.requires_grad_(is_adapter(name) or name == VALUE_HEAD)


def describe_trained_parameters(algorithm: AlgorithmArguments, lora: LoraFlags) -> str:
    """The flags that selected the trained weights, as typed; for messages and to compare two runs."""
    adapters = AdapterConfig.from_args(lora)
    if adapters is not None:
        return adapters.flags
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
