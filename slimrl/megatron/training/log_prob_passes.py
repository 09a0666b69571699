"""The log-probabilities of a rollout's samples under the weights before the rollout.

Either passes before the first optimizer step or that step itself compute them; `PassPlan` decides. Used by the trainer;
collective over all ranks.

The teacher of on-policy distillation (--use-opd) is among the passes: with --opd-type megatron its weights are a second
host copy beside the reference model's, loaded into the training model for one forward pass; with --opd-type sglang its
log-probabilities come with the batch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from slimrl.algorithms.divergence import Divergence
from slimrl.algorithms.losses import TeacherTerm
from slimrl.arguments import Arguments
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.checkpoint.start import load_initial_weights
from slimrl.megatron.data_parallel import ShardedReference, Stage, shard_reference
from slimrl.megatron.model.micro_batch import MicroBatch, without_routing
from slimrl.megatron.model.output_layer import TeacherStates, TeacherTop
from slimrl.megatron.model.routing_replay import recording
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.ref_model import BaseReference, PrecomputedReference, ReferenceWeights, StoredLogProbs
from slimrl.megatron.training.advantages import TrainingHooks
from slimrl.megatron.training.forward_step import LogProbConfig, score_tokens
from slimrl.megatron.training.loss.preference_loss import MismatchedStep
from slimrl.megatron.training.pass_plan import PassPlan
from slimrl.megatron.training.train_metrics import PhaseTimes
from slimrl.models.model_spec import ModelSpec
from slimrl.observability.tracer import Timeline


@dataclasses.dataclass(frozen=True)
class Teacher:
    """What this rank has of the teacher: `weights` in host memory, None without a teacher in the training ranks.

    `kl_coef` is the weight of the sampled reverse KL within the advantages, `states` belong to a divergence that is a
    loss instead.
    """

    weights: ReferenceWeights | ShardedReference | BaseReference | None
    kl_coef: float
    states: TeacherStates | TeacherTop | None = None

    @classmethod
    def from_args(
        cls, args: Arguments, spec: ModelSpec, stages: Sequence[GPTModel], parallel: ParallelState
    ) -> Teacher:
        """Reads the weights of --opd-teacher-load, which stay in `stages` too; collective over all ranks.

        Raises FileNotFoundError for an absent checkpoint, and ValueError if its tensors are not the student's.
        """
        coef = 0.0 if args.has_divergence else args.opd_kl_coef
        divergence = Divergence(args.opd_divergence, args.opd_jsd_beta) if args.has_divergence else None
        if not args.has_megatron_teacher or args.eval_only:
            return cls(None, coef, None if divergence is None else TeacherTop(divergence))
        states = None if divergence is None else TeacherStates(divergence)
        assert args.opd_teacher_load is not None  # checked at parse time
        try:
            load_initial_weights(spec, stages, parallel, Path(args.opd_teacher_load), args.opd_teacher_ckpt_step)
        except ValueError as error:
            raise ValueError(
                f"--opd-teacher-load {args.opd_teacher_load} is not a teacher for --opd-type megatron, which needs the"
                f" student's architecture and vocabulary ({error}): give another, or use --opd-type sglang"
            ) from error
        return cls(ReferenceWeights(stages), coef, states)

    def sharded(self, stages: Sequence[Stage]) -> Teacher:
        """The teacher for the wrapped `stages`."""
        weights = self.weights
        if isinstance(weights, ReferenceWeights):
            return dataclasses.replace(self, weights=shard_reference(weights, stages))
        return self

    def release(self) -> None:
        """Free what the pass over a rollout left for its optimizer steps."""
        if self.states is not None:
            self.states.clear()

    def term(self, batch: RolloutBatch, computed: Tensor | None, device: torch.device) -> TeacherTerm | None:
        """The term of the advantages, from the log-probabilities that the pass `computed`, or else the batch's.

        None without a teacher. `computed` is float32 [response tokens].
        """
        if isinstance(self.states, TeacherTop) and batch.teacher_top_ids is not None:
            assert batch.teacher_top_log_probs is not None  # `training_batch` has checked both
            self.states.ids = batch.teacher_top_ids.to(device)
            self.states.log_probs = batch.teacher_top_log_probs.to(device)
        log_probs = batch.teacher_log_probs if computed is None else computed
        return None if log_probs is None else TeacherTerm(log_probs.to(device), self.kl_coef)


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
    reference: ReferenceWeights | ShardedReference | BaseReference | None
    teacher: Teacher
    settings: LogProbConfig
    hooks: TrainingHooks
    parallel: ParallelState
    times: PhaseTimes
    timeline: Timeline
    with_entropy: bool  # also compute the policy's entropy
    precomputed: PrecomputedReference | None = None  # values of the reference that need no pass

    def stored(self, batch: RolloutBatch, steps: Steps) -> StoredLogProbs | None:
        """The reference's values that need no pass; None without --precompute-ref-log-probs. Collective."""
        return None if self.precomputed is None else self.precomputed.look_up(batch, [*itertools.chain(*steps)])

    def count(
        self,
        rollout_id: int,
        steps: Steps,
        mismatched: Sequence[MismatchedStep] = (),
        stored: StoredLogProbs | None = None,
        *,
        trains: bool = True,
    ) -> int:
        """Micro-batches in all passes over this rollout; those of `mismatched` also have one of the policy."""
        beside = sum(len(step.micro_batches) for step in mismatched) * 2
        everything = sum(map(len, steps))
        of_reference = everything if stored is None else len(stored.needed)
        others = self.plan.runs_reference_pass(rollout_id) * of_reference + self.plan.has_teacher * everything
        scored = self._steps_with_pass(len(steps), trains)
        return beside + others + sum(len(steps[number]) for number in scored)

    def _steps_with_pass(self, steps: int, trains: bool) -> range:
        return self.plan.steps_with_pass(steps) if trains else range(steps)

    def run(
        self,
        rollout_id: int,
        steps: Steps,
        batch: RolloutBatch,
        advance: Callable[[], None],
        mismatched: Sequence[MismatchedStep] = (),
        stored: StoredLogProbs | None = None,
        *,
        trains: bool = True,
    ) -> RolloutLogProbs:
        """Run the passes over `batch`, and the reference's over `mismatched`, without what is `stored`.

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

            def score(needed: Sequence[MicroBatch]) -> Tensor:
                (values,) = self._pass("ref_", needed, response_tokens, advance)
                scores.mismatched = [(step, self._mismatched("ref_", step, advance)) for step in mismatched]
                return values

            scores.ref_log_probs = self._of_reference(everything, stored, score)
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

    def update_reference(self, rollout_id: int) -> None:
        """After the optimizer steps of a rollout: makes the weights the reference's, if the plan says so."""
        if self.plan.updates_reference(rollout_id):
            assert self.reference is not None and not isinstance(self.reference, BaseReference)  # the rules reject LoRA
            self.reference.update()

    def _of_reference(
        self,
        micro_batches: Sequence[MicroBatch],
        stored: StoredLogProbs | None,
        score: Callable[[Sequence[MicroBatch]], Tensor],
    ) -> Tensor:
        """The reference's values, of which `score` computes those that are not `stored`."""
        needed = micro_batches if stored is None else stored.needed
        assert self.reference is not None
        computed = None
        if needed:
            with self.reference.loaded_weights():
                computed = score(needed)
        if stored is not None:
            assert self.precomputed is not None  # it has made them
            return self.precomputed.completed(stored, computed)
        assert computed is not None  # no batch is empty
        return computed

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

    def score(
        self, micro_batches: Sequence[MicroBatch], response_tokens: int, stored: StoredLogProbs | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the policy and of the reference, if there is one, of samples that are not trained on.

        Float32 [response_tokens]. Those that are `stored` need no pass. Their time is in no phase of a rollout.
        """

        def scored(store_prefix: str, chosen: Sequence[MicroBatch]) -> Tensor:
            self.hooks.before_log_probs(store_prefix)
            parts = (self.stages, chosen, self.settings, response_tokens, self.parallel)
            return score_tokens(*parts, lambda: None)[0]

        reference = None
        if self.reference is not None:
            reference = self._of_reference(micro_batches, stored, functools.partial(scored, "ref_"))
        return scored("", micro_batches), reference

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
        if store_prefix:
            micro_batches = without_routing(micro_batches)
        recorded = recording(micro_batch.sequences.routing for micro_batch in micro_batches)
        with self.times.phase(name), self.timeline.span(name), recorded:
            return score_tokens(
                self.stages,
                micro_batches,
                self.settings if settings is None else settings,
                response_tokens,
                self.parallel,
                advance,
                columns=1 + with_entropy,
            )
