"""One rollout on a rank of the policy: log-probabilities, advantages, optimizer steps, and the metrics of all of these.

The parts of `PolicyRollout` run in order, each collective over the policy's ranks: `score`, `prepare`, `train`. A
critic gives its values before `prepare`, which computes its targets; it is in the same ranks (`Critic`), or in ranks of
its own (`CriticTrainer`), which work meanwhile. `KLController` has the coefficient of the KL penalty, which may follow
--kl-target from rollout to rollout.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.algorithms.losses import next_entropy_coef, next_kl_coef
from slimrl.arguments.flags.algorithm import AlgorithmArguments
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron import data_parallel
from slimrl.megatron.model.micro_batch import MicroBatch, MicroBatchPacker
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.training.advantages import RolloutData, TrainingHooks, build_train_inputs
from slimrl.megatron.training.critic import ValueColumns
from slimrl.megatron.training.forward_step import TrainTensors, forward_backward, layer_tokens_by_count
from slimrl.megatron.training.log_prob_passes import LogProbPasses, RolloutLogProbs
from slimrl.megatron.training.loss.loss_sums import LossSums, reduce_step
from slimrl.megatron.training.profiling import ACTOR, MemoryReport, PartProfiler
from slimrl.megatron.training.step_loss import StepLoss
from slimrl.megatron.training.train_metrics import PhaseTimes, rollout_metrics, save_train_data, step_counts
from slimrl.megatron.training.trained_model import TrainedModel
from slimrl.models.model_spec import ModelSpec
from slimrl.observability.tracer import Timeline

_COEF, _ENTROPY_COEF, _ENTROPY = "kl_coef", "entropy_coef", "entropy"


class KLController:
    """One rank's coefficient, equal on all ranks.

    `numbers` is what a checkpoint saves and restores in place; empty without --kl-target.
    """

    def __init__(self, algorithm: AlgorithmArguments, device: torch.device) -> None:
        self._target, self._horizon, self._device = algorithm.kl_target, algorithm.kl_horizon, device
        self.numbers = {} if self._target is None else {_COEF: algorithm.kl_coef}

    def applied_to(self, algorithm: AlgorithmArguments) -> AlgorithmArguments:
        """The flags with the current coefficient as --kl-coef."""
        return algorithm if self._target is None else dataclasses.replace(algorithm, kl_coef=self.numbers[_COEF])

    def after_rollout(self, metrics: dict[str, float], samples: int) -> None:
        """Notes the coefficient of a rollout of so many samples in its `metrics`, and moves it; collective."""
        if self._target is None:
            return
        coef = self.numbers[_COEF]
        metrics["rollout/kl_coef"] = coef
        # sums on a device may be rounded differently by each rank
        kl = torch.tensor(metrics["rollout/sample_kl"], dtype=torch.float64, device=self._device)
        dist.broadcast(kl, src=0)
        if not kl.isfinite():  # of a step that was skipped for that: the coefficient would never be finite again
            return
        moved = next_kl_coef(coef, float(kl), target=self._target, samples=samples, horizon=self._horizon)
        self.numbers[_COEF] = moved


class EntropyController:
    """One rank's coefficient of the entropy bonus, equal on all ranks; see `next_entropy_coef`.

    The entropy of a rollout is that of its first optimizer step. The bonus is on while that of the rollout before was
    at most the target. `numbers` is that of the rank's `KLController`, which a checkpoint has; it gets an own entry.
    """

    def __init__(self, algorithm: AlgorithmArguments, device: torch.device, numbers: dict[str, float]) -> None:
        self._target, self._delta, self._device = algorithm.entropy_target, algorithm.entropy_coef_delta, device
        self.numbers = numbers
        if self._target is not None:
            numbers.update({_ENTROPY_COEF: algorithm.entropy_coef, _ENTROPY: 0.0})

    def applied_to(self, loss: StepLoss) -> StepLoss:
        """The loss with the current coefficient."""
        if self._target is None:
            return loss
        return dataclasses.replace(loss, settings=dataclasses.replace(loss.settings, entropy_coef=self._now))

    @property
    def _now(self) -> float:
        assert self._target is not None
        return self.numbers[_ENTROPY_COEF] if self.numbers[_ENTROPY] <= self._target else 0.0

    def after_rollout(self, metrics: dict[str, float], steps: Sequence[dict[str, float]]) -> None:
        """Notes the coefficient of a rollout in its `metrics`, and moves it by those of its `steps`; collective."""
        if self._target is None:
            return
        metrics["rollout/entropy_coef"] = self._now
        # sums on a device may be rounded differently by each rank
        entropy = torch.tensor(steps[0]["entropy_loss"], dtype=torch.float64, device=self._device)
        dist.broadcast(entropy, src=0)
        if not entropy.isfinite():
            return
        coef = next_entropy_coef(self.numbers[_ENTROPY_COEF], float(entropy), target=self._target, delta=self._delta)
        self.numbers.update({_ENTROPY_COEF: coef, _ENTROPY: float(entropy)})


@dataclasses.dataclass
class PolicyParts:
    """What the rollouts of one rank have in common. The first `critic_only_rollouts` do not train the policy."""

    algorithm: AlgorithmArguments
    spec: ModelSpec
    policy: TrainedModel
    loss: StepLoss
    passes: LogProbPasses
    hooks: TrainingHooks
    kl: KLController
    entropy: EntropyController
    pack: MicroBatchPacker
    parallel: ParallelState
    times: PhaseTimes
    timeline: Timeline
    profiler: PartProfiler
    memory_report: MemoryReport
    critic_only_rollouts: int
    layers_add_losses: bool
    log_correct_samples: bool
    dump_template: str | None  # of --save-debug-train-data


class PolicyRollout:
    """The training on this data-parallel rank's part of one rollout.

    Public state: `steps` are the micro-batches of each optimizer step, `metrics` those of the rollout, after `train`.
    """

    def __init__(
        self,
        parts: PolicyParts,
        rollout_id: int,
        batch: RolloutBatch,
        on_progress: Callable[[int, int], None],
        passes_of_critic: int = 0,
    ) -> None:
        """`batch` contains the schedule. `passes_of_critic` over the batch also call `advance`."""
        self._parts, self._rollout_id, self.batch = parts, rollout_id, batch
        with parts.times.phase("data_preprocess"):
            self.steps = parts.pack.steps(batch)
            self._mismatched = parts.loss.mismatched(batch)
            self._stored = parts.passes.stored(batch, self.steps)
        self._trains = rollout_id >= parts.critic_only_rollouts
        micro_batches = sum(map(len, self.steps))
        beside = self._mismatched, self._stored
        scored = parts.passes.count(rollout_id, self.steps, *beside, trains=self._trains)
        total = (passes_of_critic + self._trains) * micro_batches + scored
        count = itertools.count(1)

        def advance() -> None:
            parts.timeline.mark("micro-batch")
            on_progress(next(count), total)

        self.advance = advance
        self.metrics: dict[str, float] = {}
        self._scores = RolloutLogProbs()
        self._columns: TrainTensors | None = None
        self._data: RolloutData | None = None

    def score(self) -> None:
        """Runs the log-probability passes."""
        run, inputs = self._parts.passes.run, (self._rollout_id, self.steps, self.batch)
        self._scores = run(*inputs, self.advance, self._mismatched, self._stored, trains=self._trains)

    def prepare(self, values: Tensor | None) -> None:
        """Computes the inputs of the loss; `values` float32 [response tokens] are a critic's, if there is one."""
        parts, scores = self._parts, self._scores
        self._columns, self._data = build_train_inputs(
            parts.kl.applied_to(parts.algorithm),
            parts.hooks,
            self._rollout_id,
            self.batch,
            scores.train_log_probs,
            scores.ref_log_probs,
            values,
            parts.parallel.dp_group,
            parts.parallel.device,
            scores.teacher,
        )

    @property
    def columns(self) -> TrainTensors:
        """The inputs of the loss, after `prepare`."""
        assert self._columns is not None
        return self._columns

    @property
    def value_columns(self) -> ValueColumns:
        """What the critic is trained on, after `prepare`."""
        columns = self.columns
        assert columns.values is not None and columns.returns is not None  # of `build_train_inputs`
        return ValueColumns(columns.values, columns.returns, columns.loss_mask)

    def dump(self) -> None:
        """Writes the data of --save-debug-train-data, after `prepare`."""
        parts = self._parts
        if parts.dump_template is not None:
            with_policy = parts.algorithm.compute_advantages_and_returns
            place = (parts.dump_template, self._rollout_id)
            save_train_data(*place, self.batch, self.columns, parts.parallel, with_policy=with_policy)

    def train(self, of_critic: Sequence[dict[str, float]] = ()) -> list[dict[str, float]]:
        """Takes the optimizer steps; metrics of each, with those `of_critic` of the same step.

        Raises FloatingPointError if loss or gradient is not finite (see `NonFiniteGuard`).
        """
        parts = self._parts
        metrics = step_counts(self.batch)
        if of_critic:
            metrics = [counts | own for counts, own in zip(metrics, of_critic, strict=True)]
        if self._trains:
            own_steps = self._steps()
            metrics = [other | own for own, other in zip(own_steps, metrics, strict=True)]
        parts.passes.update_reference(self._rollout_id)
        parts.passes.teacher.release()
        self.metrics = self._report()
        if self._trains:
            parts.kl.after_rollout(self.metrics, sum(self.batch.samples_per_step))
            parts.entropy.after_rollout(self.metrics, own_steps)
        return metrics

    def _steps(self) -> list[dict[str, float]]:
        parts, batch, columns, scores = self._parts, self.batch, self.columns, self._scores
        loss, metrics = parts.entropy.applied_to(parts.loss), []
        part = parts.profiler.part(ACTOR, self._rollout_id)
        with part, parts.times.phase("actor_train"), data_parallel.overlapped_param_gather(parts.policy.wrapped):
            for number, micro_batches in enumerate(self.steps):
                samples = batch.samples_per_step[number]
                with parts.memory_report.step(), parts.timeline.span("forward and backward", optimizer_step=number):
                    parts.policy.begin_step()
                    parts.hooks.before_step(self._rollout_id, number)
                    sums_of = loss.sums_of(batch, columns, self._data, scores, number, self.advance)
                    sums = self._accumulate(micro_batches, sums_of, samples)
                scores.complete(micro_batches, parts.parallel)
                where = f"rollout {self._rollout_id}, optimizer step {number}"
                with parts.timeline.span("optimizer step", optimizer_step=number):
                    step = reduce_step(sums, loss.settings, parts.parallel)
                    step |= parts.policy.step(step["loss"], where, lambda: columns.broken_samples(batch))
                if parts.policy.reference is not None and columns.ref_log_probs is None:
                    step.pop("kl_loss", None)  # absent, since it was not computed for this rollout
                metrics.append(step)
                parts.memory_report.note(micro_batches)
        return metrics

    def _accumulate(
        self, micro_batches: list[MicroBatch], sums_of: Callable[[Tensor, MicroBatch], LossSums], samples: int
    ) -> list[LossSums]:
        """Accumulates the gradient of one optimizer step; `samples` counts those of all ranks."""
        parts, weight = self._parts, None
        if parts.layers_add_losses:
            count = None if parts.loss.settings.per_token else samples
            config = parts.policy.stages[0].config
            weight = layer_tokens_by_count(config, micro_batches, self.columns.loss_mask, count, parts.parallel)
        scores = parts.loss.scores
        return forward_backward(parts.policy.wrapped, micro_batches, scores, sums_of, self.advance, by_tokens=weight)

    def _report(self) -> dict[str, float]:
        parts = self._parts
        return rollout_metrics(
            parts.algorithm,
            parts.spec,
            self.batch,
            self.columns,
            self.columns.returns if parts.hooks.advantages is None else None,
            self._scores.entropy,
            parts.times.take(),
            parts.parallel,
            log_correct_samples=parts.log_correct_samples,
            scored_rows=self._scores.scored_rows,
            reference_rows=range(len(self.batch)) if self._stored is None else self._stored.rows,
            stored=None if self._stored is None else self._stored.known,
        )
