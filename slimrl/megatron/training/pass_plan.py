"""Which log-probability passes a rollout needs before its first optimizer step, and why.

The forward pass of a rollout's first optimizer step computes the old log-probabilities of its own samples: the weights
are those from before the rollout. So a pass of the policy is needed only for the samples of later steps, and for all
of them where something reads the values before the first step or where that step's forward pass gives other values.
Imports neither torch nor megatron: the driver logs the plan.
"""

from __future__ import annotations

import dataclasses

from slimrl.algorithms.preference_losses import PREFERENCE_LOSSES
from slimrl.arguments import Arguments


@dataclasses.dataclass(frozen=True)
class PassPlan:
    """`reasons` are why every sample needs a pass of the policy; without any, those of the first step need none."""

    needs_old_log_probs: bool  # False: the loss uses only the current policy's log-probabilities, and no pass runs
    reasons: tuple[str, ...]
    steps: int  # optimizer steps per rollout, as planned
    has_reference: bool
    reference_interval: int  # the reference's pass runs every that many rollouts
    reference_updates: int | None = None  # the trained weights become the reference after every that many rollouts
    has_teacher: bool = False  # the teacher's pass runs for every rollout
    precomputed: str | None = None  # the folder of --precompute-ref-log-probs, whose samples need no reference pass
    estimates_kl: bool = False  # KTO: passes over mismatched responses, of the policy before each optimizer step

    @classmethod
    def from_args(cls, args: Arguments) -> PassPlan:
        """The plan of a run."""
        only_logged = args.kl_coef == 0 and args.kl_loss_coef == 0 and not args.trains_on_pairs
        reasons = {
            "--compute-old-log-probs always": args.compute_old_log_probs == "always",
            "--ci-test": args.ci_test,  # it compares the two forward passes
            # these read the values before the first step; the penalty of the first is a part of the advantages
            "--kl-coef": args.kl_coef != 0,
            "--use-opd": args.use_opd and not args.has_divergence and not args.use_rollout_logprobs,
            "--tis-batch-normalize": args.tis_batch_normalize and args.custom_tis_function_path is None,
            "--loss-type custom_loss": args.loss_type == "custom_loss",
            "--custom-advantage-function-path": args.custom_advantage_function_path,
            "--rollout-data-postprocess-path": args.rollout_data_postprocess_path,
            "--custom-megatron-before-log-prob-hook-path": args.custom_megatron_before_log_prob_hook_path,
            "--save-debug-train-data": args.save_debug_train_data,
            # with these a forward pass in training differs from one in evaluation, which the pass is
            "--attention-dropout": args.attention_dropout > 0,
            "--hidden-dropout": args.hidden_dropout > 0,
            "--moe-input-jitter-eps": args.moe_input_jitter_eps is not None,
            "--moe-router-load-balancing-type sinkhorn": "sinkhorn" in args.moe_router_load_balancing_type,
            # delayed scaling updates the scales between the micro-batches of a step
            "--fp8-recipe delayed": args.fp8_format is not None and args.fp8_recipe == "delayed",
            "--custom-megatron-init-path": args.custom_megatron_init_path,
            "--custom-megatron-before-train-step-hook-path": args.custom_megatron_before_train_step_hook_path,
            "--custom-model-provider-path": args.custom_model_provider_path,
            "--spec": args.spec,
        }
        return cls(
            needs_old_log_probs=args.compute_advantages_and_returns,
            reasons=tuple(flag for flag, given in reasons.items() if given),
            steps=args.num_steps_per_rollout or 1,
            has_reference=args.has_reference_pass,
            reference_interval=args.ref_kl_metric_interval if only_logged else 1,
            reference_updates=args.ref_update_interval,
            has_teacher=args.has_megatron_teacher and args.compute_advantages_and_returns,
            precomputed=args.precompute_ref_log_probs,
            estimates_kl=args.trains_on_labels and PREFERENCE_LOSSES[args.preference_loss].has_kl,
        )

    @property
    def reuses_first_step(self) -> bool:
        """Whether the first optimizer step's forward pass gives its samples' old log-probabilities."""
        return self.needs_old_log_probs and not self.reasons

    def steps_with_pass(self, steps: int) -> range:
        """The optimizer steps, of so many, whose samples the policy's pass scores."""
        if not self.needs_old_log_probs:
            return range(0)
        return range(0 if self.reasons else 1, steps)

    def runs_reference_pass(self, rollout_id: int) -> bool:
        """Whether the reference's pass runs for this rollout."""
        return self.has_reference and rollout_id % self.reference_interval == 0

    def updates_reference(self, rollout_id: int) -> bool:
        """Whether the weights after this rollout become the reference's."""
        every = self.reference_updates
        return self.has_reference and every is not None and (rollout_id + 1) % every == 0

    def sentence(self) -> str:
        """What runs and why, for the log."""
        if not self.needs_old_log_probs and self.has_reference:
            if self.estimates_kl:
                return (
                    f"{self._reference()}, and one of it for every rollout and of the policy for every optimizer step"
                    " over mismatched responses, for the KL estimate of KTO"
                )
            return f"{self._reference()}; no pass of the policy: no advantages are computed"
        if not self.needs_old_log_probs:
            return "no log-probability pass runs before the optimizer steps: no advantages are computed"
        teacher = "; a pass of the teacher for every rollout" if self.has_teacher else ""
        return f"{self._policy()}; {self._reference()}{teacher}"

    def _policy(self) -> str:
        if self.reasons:
            return f"a pass computes the old log-probabilities of all samples ({', '.join(self.reasons)})"
        if self.steps == 1:
            return "no pass computes old log-probabilities: the one optimizer step of a rollout computes them itself"
        later = "step 2" if self.steps == 2 else f"steps 2 to {self.steps}"
        return (
            f"a pass computes the old log-probabilities of the samples of optimizer {later} of a rollout: step 1"
            " computes its own"
        )

    def _reference(self) -> str:
        if not self.has_reference:
            return "no reference model"
        if self.precomputed is not None:
            return f"a pass of the reference model for samples that --precompute-ref-log-probs {self.precomputed} lacks"
        weights = ""
        if self.reference_updates is not None:
            rollouts = "rollout" if self.reference_updates == 1 else f"{self.reference_updates} rollouts"
            weights = f", which takes the trained weights after every {rollouts} (--ref-update-interval),"
        if self.reference_interval == 1:
            return f"a pass of the reference model{weights} for every rollout"
        return (
            f"a pass of the reference model{weights} for every rollout whose number is a multiple of"
            f" {self.reference_interval} (--ref-kl-metric-interval)"
        )
