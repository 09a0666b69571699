"""Flags of the learning algorithm (advantages, policy loss, KL), and of on-policy distillation (unsupported)."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from slimrl.algorithms.estimators import DEFAULT, ESTIMATORS, Returns
from slimrl.arguments.flag import flag

_ESTIMATORS = tuple(ESTIMATORS)
_WHITENED = " and ".join(name for name, row in ESTIMATORS.items() if row.whitens)
_DISCOUNTED = " and ".join(name for name, row in ESTIMATORS.items() if row.returns is Returns.DISCOUNTED)
_RETURNS = "it belongs to a critic, which this version does not have; leave it out"
_REPLAY = "routing is not replayed in this version; leave it out"


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression ({error})") from None
    return text


@dataclasses.dataclass
class AlgorithmArguments:
    """Advantages and losses."""

    advantage_estimator: str = flag(
        DEFAULT,
        "how rewards become advantages",
        choices=(*_ESTIMATORS, "ppo"),
        not_served="there is no critic in this version; use reinforce_plus_plus, which has returns without one",
        served=tuple(name for name in _ESTIMATORS if name != DEFAULT),
    )
    loss_type: str = flag(
        "policy_loss",
        "what is minimised",
        choices=("policy_loss", "sft_loss", "custom_loss"),
    )
    custom_loss_function_path: str | None = flag(
        None, "loss of --loss-type custom_loss (dotted import path); it needs logits and implies --keep-logits"
    )
    custom_advantage_function_path: str | None = flag(
        None, "function that computes advantages (dotted import path); --advantage-estimator still decides the loss"
    )
    custom_pg_loss_reducer_function_path: str | None = flag(
        None,
        "function that makes the policy loss's mean (dotted import path; as --calculate-per-token-loss says)",
    )
    compute_advantages_and_returns: bool = flag(
        True,
        "no advantages, old or reference log-probabilities: for --loss-type sft_loss, or a custom_loss that needs none",
        negated=True,
        off=("--disable-compute-advantages-and-returns",),
    )
    gamma: float = flag(1.0, f"discount of later rewards in the returns of {_DISCOUNTED}", at_least=0, at_most=1)
    lambd: float = flag(1.0, "lambda of generalised advantage estimation", not_served=_RETURNS)
    value_clip: float = flag(0.2, "clip of the value loss", not_served=_RETURNS)
    num_critic_only_steps: int = flag(0, "rollouts that train the critic only (count)", not_served=_RETURNS)
    eps_clip: float = flag(0.2, "the policy ratio is clipped below at 1 - this", at_least=0)
    eps_clip_high: float = flag(None, "the policy ratio is clipped above at 1 + this (--eps-clip)", at_least=0)
    eps_clip_c: float | None = flag(
        None, "bound of the dual clip for negative advantages, above 1 (no dual clip)", above=1
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    use_kl_loss: bool = flag(False, "add the KL to the reference as a loss; with coefficient 0 it is only logged")
    kl_loss_coef: float = flag(0.0, "weight of the KL loss")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = flag(
        "k1", "KL estimator of the loss and of --kl-coef", choices=("k1", "k2", "k3", "low_var_kl")
    )
    kl_coef: float = flag(0.0, "weight of the KL penalty inside the advantage; needs --ref-load")
    normalize_advantages: bool = flag(
        False,
        f"whiten advantages over the trained tokens of the rollout (on with --advantage-estimator {_WHITENED})",
    )
    grpo_std_normalization: bool = flag(
        True,
        "do not divide by the group's standard deviation (Dr. GRPO)",
        negated=True,
        off=("--disable-grpo-std-normalization",),
    )
    rewards_normalization: bool = flag(
        True,
        "use rewards as they are: no group mean, no group deviation",
        negated=True,
        off=("--disable-rewards-normalization",),
    )
    calculate_per_token_loss: bool = flag(False, "mean over all tokens of the step (mean of the samples' means)")
    use_rollout_logprobs: bool = flag(False, "the engines' log-probabilities as the old policy (recomputed ones)")
    use_unbiased_kl: bool = flag(False, "multiply the KL loss by the policy ratio (DeepSeek-V3.2)")
    ref_update_interval: int | None = flag(
        None,
        "renew the reference from the trained weights every that many rollouts (never)",
        at_least=1,
        not_served="the reference stays what --ref-load holds; leave it out",
    )
    keep_old_actor: bool = flag(
        False,
        "keep an older copy of the weights for the old log-probabilities",
        not_served="use --use-rollout-logprobs, whose old policy is the one that generated",
    )
    use_rollout_entropy: bool = flag(False, "log the entropy before training too, of all samples (rollout/entropy)")
    use_tis: bool = flag(
        False, "weigh each token by training's over the engines' probability (truncated importance sampling)"
    )
    tis_clip: float = flag(2.0, "largest such weight", above=0)
    tis_clip_low: float = flag(0.0, "smallest such weight", at_least=0)
    custom_tis_function_path: str | None = flag(
        None,
        "function that corrects the policy loss with --use-tis (dotted import path; weights within the two bounds)",
    )
    get_mismatch_metrics: bool = flag(
        False, "log KL and perplexities of engines and training for the same samples (train/mismatch_...)"
    )
    use_opsm: bool = flag(
        False, "leave out samples with a negative advantage that have drifted off-policy (DeepSeek-V3.2)"
    )
    opsm_delta: float = flag(
        1e-4, "drift beyond which --use-opsm leaves a sample out (mean old less new log-probability)", at_least=0
    )
    use_routing_replay: bool = flag(
        False, "use the routing of the log-probability pass in training", not_served=_REPLAY
    )
    use_rollout_routing_replay: bool = flag(False, "use the engines' routing in training", not_served=_REPLAY)
    only_train_params_name_list: list[str] | None = flag(
        None,
        "train only weights in whose Megatron name one of these regular expressions is found (all)",
        nargs="*",
        parse=_regular_expression,
    )
    freeze_params_name_list: list[str] | None = flag(
        None,
        "do not train weights in whose Megatron name one of these regular expressions is found (none)",
        nargs="*",
        parse=_regular_expression,
    )
    custom_megatron_before_log_prob_hook_path: str | None = flag(
        None,
        "function that runs before each log-probability pass (dotted import path)",
    )
    custom_megatron_before_train_step_hook_path: str | None = flag(
        None,
        "function that runs before each optimizer step (dotted import path)",
    )
    rollout_data_postprocess_path: str | None = flag(
        None, "function that sees, and may change, a rank's share of a rollout before its steps (dotted import path)"
    )

    @property
    def use_reference(self) -> bool:
        """True where the reference model is needed: a KL penalty, or a KL loss (even one that is only logged)."""
        return self.kl_coef != 0.0 or self.use_kl_loss


_OPD = "distillation is not served in this version; use --use-kl-loss with the teacher as --ref-load"


@dataclasses.dataclass
class DistillationArguments:
    """On-policy distillation."""

    use_opd: bool = flag(False, "learn from a teacher's log-probabilities", not_served=_OPD)
    opd_type: str | None = flag(None, "where the teacher runs", choices=("sglang", "megatron"), not_served=_OPD)
    opd_kl_coef: float = flag(1.0, "weight of the reverse KL to the teacher", not_served=_OPD)
    opd_teacher_load: str | None = flag(None, "the teacher's checkpoint", not_served=_OPD)
    opd_teacher_ckpt_step: int | None = flag(None, "iteration to read from it", not_served=_OPD)
