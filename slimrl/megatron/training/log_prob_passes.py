"""The log-probabilities of a rollout's samples under the weights before the rollout.

Either passes before the first optimizer step or that step itself compute them; `PassPlan` decides. Used by the trainer;
collective over all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slimrl.algorithms.losses import TeacherTerm
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.data_parallel import ShardedReference, Stage
from slimrl.megatron.model.micro_batch import MicroBatch
from slimrl.megatron.model.output_layer import TeacherStates
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.ref_model import ReferenceWeights
from slimrl.megatron.teacher import Teacher
from slimrl.megatron.training.advantages import TrainingHooks
from slimrl.megatron.training.forward_step import LogProbConfig, score_tokens
from slimrl.megatron.training.loss.mismatched import MismatchedStep
from slimrl.megatron.training.pass_plan import PassPlan
from slimrl.megatron.training.reporting.train_metrics import PhaseTimes
from slimrl.observability.tracer import Timeline

Steps = Sequence[Sequence[MicroBatch]]  # micro-batches of each optimizer step


@dataclasses.dataclass
class RolloutLogProbs:
    """Float32 [response tokens of the rank] each; None if neither a pass nor a step computes it.

    While `first_step` is set, `train_log_probs` and `entropy` are 0 at the samples of the first optimizer step. The
    step's forward pass calls `note` for every micro-batch, and `complete` then fills the values in.
    """

    train_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    teacher: TeacherTerm | None = None
    entropy: Tensor | None = None
    scored_rows: list[int] = dataclasses.field(default_factory=list)  # samples in the policy's pass
    first_step: Tensor | None = None  # [columns, response tokens], values from `note`
    mismatched: list[tuple[MismatchedStep, Tensor]] = dataclasses.field(default_factory=list)  # the reference's values

    def note(self, micro_batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> None:
        """Store the last stage's values of one micro-batch of the first step, without gradient."""
        assert self.first_step is not None
        for row, values in zip(self.first_step, (log_probs, entropy), strict=False):
            row[micro_batch.response_index] = values

    def complete(self, micro_batches: Sequence[MicroBatch], parallel: ParallelState) -> None:
        """Copy the values of the first step into the columns, on all ranks that share these samples."""
        if self.first_step is None:
            return
        index = torch.cat([micro_batch.response_index for micro_batch in micro_batches])
        found = parallel.from_last_stage(self.first_step[:, index])
        for column, values in zip((self.train_log_probs, self.entropy), found, strict=False):
            assert column is not None  # as many as there are rows
            column[index] = values
        self.first_step = None


@dataclasses.dataclass
class LogProbPasses:
    """Runs the passes of `plan` over a rollout."""

    plan: PassPlan
    stages: Sequence[Stage]
    reference: ReferenceWeights | ShardedReference | None
    teacher: Teacher
    settings: LogProbConfig
    hooks: TrainingHooks
    parallel: ParallelState
    times: PhaseTimes
    timeline: Timeline
    with_entropy: bool  # also compute the policy's entropy

    def count(
        self, rollout_id: int, steps: Steps, mismatched: Sequence[MismatchedStep] = (), *, trains: bool = True
    ) -> int:
        """Micro-batches in all passes over this rollout; those of `mismatched` also have one of the policy."""
        beside = sum(len(step.micro_batches) for step in mismatched) * 2
        others = self.plan.runs_reference_pass(rollout_id) + self.plan.has_teacher
        scored = self._steps_with_pass(len(steps), trains)
        return beside + others * sum(map(len, steps)) + sum(len(steps[number]) for number in scored)

    def _steps_with_pass(self, steps: int, trains: bool) -> range:
        return self.plan.steps_with_pass(steps) if trains else range(steps)

    def run(
        self,
        rollout_id: int,
        steps: Steps,
        batch: RolloutBatch,
        advance: Callable[[], None],
        mismatched: Sequence[MismatchedStep] = (),
        *,
        trains: bool = True,
    ) -> RolloutLogProbs:
        """Run the passes over `batch`, and the reference's over `mismatched`.

        `advance` is called at the start of each micro-batch.
        Without `trains` no optimizer step of the policy follows that could compute log-probabilities itself.
        """
        scores, response_tokens = RolloutLogProbs(), batch.loss_mask.numel()
        everything = [micro_batch for step in steps for micro_batch in step]
        if self.plan.needs_old_log_probs:
            computed = None
            if self.teacher.weights is not None:
                states = self.teacher.states if isinstance(self.teacher.states, TeacherStates) else None
                own = dataclasses.replace(self.settings, records=states)
                with self.teacher.weights.loaded_weights():
                    (computed,) = self._pass("teacher_", everything, response_tokens, advance, settings=own)
            scores.teacher = self.teacher.term(batch, computed, self.parallel.device)
        if self.reference is not None and self.plan.runs_reference_pass(rollout_id):
            with self.reference.loaded_weights():
                (scores.ref_log_probs,) = self._pass("ref_", everything, response_tokens, advance)
                scores.mismatched = [(step, self._mismatched("ref_", step, advance)) for step in mismatched]
        if not self.plan.needs_old_log_probs:
            return scores
        chosen = [micro_batch for number in self._steps_with_pass(len(steps), trains) for micro_batch in steps[number]]
        columns = list(torch.zeros(1 + self.with_entropy, response_tokens, device=self.parallel.device))
        if chosen:
            columns = self._pass("", chosen, response_tokens, advance, with_entropy=self.with_entropy)
        scores.train_log_probs, *rest = columns
        scores.entropy = rest[0] if rest else None
        scores.scored_rows = [row for micro_batch in chosen for row in micro_batch.rows]
        if self.plan.reuses_first_step and trains:
            scores.first_step = torch.zeros(len(columns), response_tokens, device=self.parallel.device)
        return scores

    def kl(
        self, step: MismatchedStep, ref_log_probs: Tensor, advance: Callable[[], None], *, within: str | None
    ) -> Tensor:
        """The KL estimate of an optimizer step under the current weights, a float64 scalar; collective.

        `within` is the phase of the rollout in which it is computed.
        """
        policy = self._mismatched("", step, advance, within=within)
        return step.kl(policy, ref_log_probs, self.parallel.dp_group)

    def _mismatched(
        self, store_prefix: str, step: MismatchedStep, advance: Callable[[], None], *, within: str | None = None
    ) -> Tensor:
        self.hooks.before_log_probs(store_prefix)
        name = "kl_log_probs"
        parts = (self.stages, step.micro_batches, self.settings, step.response_tokens, self.parallel, advance)
        with self.times.phase(name, within=within), self.timeline.span(name):
            return score_tokens(*parts)[0]

    def score(self, micro_batches: Sequence[MicroBatch], response_tokens: int) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the policy and of the reference, if there is one, of samples that are not trained on.

        Float32 [response_tokens]. Their time is in no phase of a rollout.
        """

        def scored(store_prefix: str) -> Tensor:
            self.hooks.before_log_probs(store_prefix)
            parts = (self.stages, micro_batches, self.settings, response_tokens, self.parallel)
            return score_tokens(*parts, lambda: None)[0]

        if self.reference is None:
            return scored(""), None
        with self.reference.loaded_weights():
            reference = scored("ref_")
        return scored(""), reference

    def _pass(
        self,
        store_prefix: str,
        micro_batches: Sequence[MicroBatch],
        response_tokens: int,
        advance: Callable[[], None],
        *,
        with_entropy: bool = False,
        settings: LogProbConfig | None = None,
    ) -> list[Tensor]:
        self.hooks.before_log_probs(store_prefix)
        name = f"{store_prefix}log_probs"
        with self.times.phase(name), self.timeline.span(name):
            return score_tokens(
                self.stages,
                micro_batches,
                self.settings if settings is None else settings,
                response_tokens,
                self.parallel,
                advance,
                columns=1 + with_entropy,
            )
