"""The teacher of on-policy distillation (--use-opd) in a training rank.

With --opd-type megatron its weights are a second host copy beside the reference model's, loaded into the training
model for one forward pass; with --opd-type sglang its log-probabilities come with the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from slimrl.algorithms.divergence import Divergence
from slimrl.algorithms.losses import TeacherTerm
from slimrl.arguments import Arguments
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.checkpoint.state import load_initial_weights
from slimrl.megatron.data_parallel import ShardedReference, Stage, shard_reference
from slimrl.megatron.model.output_layer import TeacherStates, TeacherTop
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.ref_model import ReferenceWeights
from slimrl.models.model_spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class Teacher:
    """What this rank has of the teacher: `weights` in host memory, None without a teacher in the training ranks.

    `kl_coef` is the weight of the sampled reverse KL within the advantages, `states` belong to a divergence that is a
    loss instead.
    """

    weights: ReferenceWeights | ShardedReference | None
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
