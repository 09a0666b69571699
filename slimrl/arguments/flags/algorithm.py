"""Flags of the algorithm: advantages, policy loss, KL, losses of preferences and reward models."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from slimrl.algorithms.estimators import DEFAULT, ESTIMATORS, Returns
from slimrl.algorithms.preference_losses import (
    DEFAULT_PREFERENCE_LOSS,
    DEFAULT_REWARD_MODEL_LOSS,
    PREFERENCE_LOSSES,
    REWARD_MODEL_LOSSES,
)
from slimrl.arguments.flag import flag

_ESTIMATORS = tuple(ESTIMATORS)
_WHITENED = " and ".join(name for name, row in ESTIMATORS.items() if row.whitens)
_DISCOUNTED = " and ".join(name for name, row in ESTIMATORS.items() if row.returns is not Returns.BROADCAST)
WITH_CRITIC = tuple(name for name, row in ESTIMATORS.items() if row.has_critic)
_WITH_CRITIC = " and ".join(WITH_CRITIC)
_LEVELS = ("token", "sequence", "geometric")


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression ({error})") from None
    return text


_BETAS = ", ".join(f"{name} {row.beta:g}" for name, row in PREFERENCE_LOSSES.items())
_OF_LABELS = ", ".join(name for name, row in PREFERENCE_LOSSES.items() if not row.compares)
_SMOOTHED = ", ".join(name for name, row in PREFERENCE_LOSSES.items() if row.smooths)


@dataclasses.dataclass
class PreferenceArguments:
    """Losses of preferences (DPO and its relatives, KTO), with --loss-type preference_loss."""

    preference_loss: str = flag(
        DEFAULT_PREFERENCE_LOSS,
        "loss of a preferred and a rejected response, sigmoid is DPO; kto and apo_zero_unpaired of single responses"
        " that are labelled as desirable or not",
        choices=tuple(PREFERENCE_LOSSES),
        hints={"dpo": "give sigmoid, which is the loss of DPO"},
    )
    preference_beta: float = flag(
        None,
        f"beta of the preference loss: scale of the implicit rewards; lambda of orpo (by loss: {_BETAS})",
        above=0,
    )
    preference_label_smoothing: float = flag(
        0.0, f"assumed probability that the two responses of a pair are exchanged, below 0.5 ({_SMOOTHED})", at_least=0
    )
    preference_reference_free: bool = flag(
        False, "leave the reference model out of the preference loss: its log-probabilities count as equal"
    )
    precompute_ref_log_probs: str | None = flag(
        None,
        "folder of the reference's log-probabilities, by the content of the samples: those that it has need no"
        " reference pass, others are added (path)",
    )
    preference_nll_coef: float = flag(
        0.0, "weight of the preferred response's mean negative log-likelihood in the preference loss", at_least=0
    )
    simpo_gamma: float = flag(1.0, "target reward margin of --preference-loss simpo", at_least=0)
    desirable_weight: float = flag(1.0, f"weight of the loss of a desirable response ({_OF_LABELS})", at_least=0)
    undesirable_weight: float = flag(1.0, f"weight of the loss of an undesirable response ({_OF_LABELS})", at_least=0)


@dataclasses.dataclass
class RewardModelArguments:
    """Training of a reward model, with --loss-type reward_model_loss."""

    reward_model_loss: str = flag(
        DEFAULT_REWARD_MODEL_LOSS,
        "loss of a reward model: bradley_terry compares a preferred response with rejected ones, mse compares a"
        " response with its score",
        choices=tuple(REWARD_MODEL_LOSSES),
    )


@dataclasses.dataclass
class AlgorithmArguments(PreferenceArguments, RewardModelArguments):
    """Advantages and losses."""

    advantage_estimator: str = flag(
        DEFAULT,
        "advantage estimator",
        choices=_ESTIMATORS,
        hints={
            "gae": "give ppo, whose advantages are generalized ones (GAE)",
            "remax": "give opo or rloo, which need no greedy response as a baseline",
            "on_policy_distillation": "give grpo with --use-opd --opd-type sglang, and a reward or --rm-type zero",
        },
    )
    loss_type: str = flag(
        "policy_loss",
        "training loss",
        choices=("policy_loss", "sft_loss", "preference_loss", "reward_model_loss", "custom_loss"),
        hints={
            "topk_opd_loss": "give policy_loss with --use-opd, --opd-divergence and --opd-top-k",
            "dr_grpo": "give policy_loss with --advantage-estimator dr_grpo",
            "dapo": "give policy_loss with --calculate-per-token-loss",
            "dpo": "give preference_loss, whose --preference-loss sigmoid is DPO",
            "kto": "give preference_loss with --preference-loss kto",
            "rm": "give reward_model_loss",
            "sft": "give sft_loss",
        },
    )
    custom_loss_function_path: str | None = flag(
        None, "loss of --loss-type custom_loss (dotted import path); implies --keep-logits"
    )
    custom_advantage_function_path: str | None = flag(
        None, "function that computes advantages (dotted import path); --advantage-estimator still selects the loss"
    )
    custom_pg_loss_reducer_function_path: str | None = flag(
        None,
        "function that reduces the policy loss (dotted import path; set by --calculate-per-token-loss)",
    )
    compute_advantages_and_returns: bool = flag(
        True,
        "compute no advantages and no old or reference log-probabilities: for --loss-type sft_loss, or a custom_loss"
        " that needs none",
        negated=True,
        off=("--disable-compute-advantages-and-returns",),
    )
    gamma: float = flag(1.0, f"discount factor of the returns of {_DISCOUNTED}", at_least=0, at_most=1)
    lambd: float = flag(1.0, f"lambda of the generalised advantages of {_WITH_CRITIC}", at_least=0, at_most=1)
    critic_lambd: float | None = flag(
        None, f"lambda of the returns that the critic of {_WITH_CRITIC} is trained on (--lambd)", at_least=0, at_most=1
    )
    length_adaptive_gae_alpha: float | None = flag(
        None,
        "lambda of the advantages is 1 - 1 / (this x trained tokens of a response), at least 0 (VAPO; --lambd for all)",
        above=0,
    )
    eps_clip: float = flag(0.2, "lower clip of the policy ratio: 1 - this", at_least=0)
    eps_clip_high: float = flag(None, "upper clip of the policy ratio: 1 + this (--eps-clip)", at_least=0)
    eps_clip_c: float | None = flag(
        None, "bound of the dual clip for negative advantages, above 1 (no dual clip)", above=1
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    entropy_target: float | None = flag(
        None,
        "move --entropy-coef after every rollout by --entropy-coef-delta, up while the policy's mean entropy is below"
        " this and down above it, where the bonus is off (nats per token; constant coefficient)",
        above=0,
    )
    entropy_coef_delta: float = flag(0.005, "step of --entropy-coef with --entropy-target", above=0)
    positive_example_loss_coef: float = flag(
        0.0, "weight of an added likelihood loss on samples with a high reward (VAPO)", at_least=0
    )
    positive_example_reward: float = flag(
        1.0, "smallest raw reward of the samples of --positive-example-loss-coef (reward)"
    )
    use_kl_loss: bool = flag(False, "add the KL to the reference model as a loss; with coefficient 0 it is only logged")
    kl_loss_coef: float = flag(0.0, "weight of the KL loss", at_least=0)
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = flag(
        "k1", "KL estimator of the loss and of --kl-coef", choices=("k1", "k2", "k3", "low_var_kl")
    )
    kl_coef: float = flag(0.0, "weight of the KL penalty inside the advantage; needs --ref-load", at_least=0)
    kl_target: float | None = flag(
        None,
        "move --kl-coef after every rollout so that the KL of a response to the reference approaches this (nats per"
        " response; constant coefficient)",
        above=0,
    )
    kl_horizon: float = flag(10000.0, "samples in which --kl-target changes --kl-coef by its whole error", above=0)
    ref_kl_metric_interval: int = flag(
        1,
        "compute the reference's log-probabilities every that many rollouts, where the KL of --use-kl-loss is only"
        " logged",
        at_least=1,
    )
    normalize_advantages: bool = flag(
        False,
        f"whiten advantages over the trained tokens of the rollout (on with --advantage-estimator {_WHITENED})",
    )
    grpo_std_normalization: bool = flag(
        True,
        "do not divide by the group's standard deviation (always so with dr_grpo)",
        negated=True,
        off=("--disable-grpo-std-normalization",),
    )
    rewards_normalization: bool = flag(
        True,
        "do not normalize rewards: no group mean, no group standard deviation",
        negated=True,
        off=("--disable-rewards-normalization",),
    )
    calculate_per_token_loss: bool = flag(False, "mean over all tokens of the step (mean of the samples' means)")
    use_rollout_logprobs: bool = flag(False, "use the engines' log-probabilities as the old policy (recomputed ones)")
    compute_old_log_probs: Literal["auto", "always"] = flag(
        "auto",
        "compute training's log-probabilities before the first optimizer step for all samples (always), or only for"
        " samples whose values that step's own forward pass does not give (auto)",
        choices=("auto", "always"),
    )
    use_unbiased_kl: bool = flag(False, "multiply the KL loss by the policy ratio (DeepSeek-V3.2)")
    ref_update_interval: int | None = flag(
        None,
        "make the trained weights the reference model's after every N rollouts (never)",
        at_least=1,
    )
    keep_old_actor: bool = flag(
        False,
        "keep an older copy of the weights for the old log-probabilities",
        not_served="use --use-rollout-logprobs, whose old policy is the one that sampled",
    )
    use_rollout_entropy: bool = flag(False, "also log the entropy of all samples before training (rollout/entropy)")
    use_tis: bool = flag(
        False,
        "weight each token by the ratio of training to engine probability (truncated importance sampling)",
    )
    tis_clip: float = flag(2.0, "upper bound of the weight of --use-tis", above=0)
    tis_clip_low: float = flag(0.0, "lower bound of the weight of --use-tis", at_least=0)
    tis_level: Literal["token", "sequence", "geometric"] = flag(
        "token",
        "ratio of --use-tis: of a token, of a response (the product over its trained tokens), or its geometric mean",
        choices=_LEVELS,
    )
    tis_mode: Literal["truncate", "mask"] = flag(
        "truncate",
        "what --use-tis does with a ratio outside its bounds: take the bound, or weight 0 (IcePop, MIS)",
        choices=("truncate", "mask"),
    )
    tis_batch_normalize: bool = flag(
        False, "divide the weights of --use-tis by their mean over the optimizer step (self-normalized weights)"
    )
    use_rs: bool = flag(
        False, "leave tokens or samples out of the loss by the ratio of training to engine probability (rejection)"
    )
    rs_level: Literal["token", "sequence", "geometric"] = flag(
        "token",
        "ratio of --use-rs, as --tis-level; sequence and geometric reject whole samples",
        choices=_LEVELS,
    )
    rs_lower_bound: float | None = flag(None, "lower bound of the ratio of --use-rs (no bound)", above=0)
    rs_upper_bound: float | None = flag(None, "upper bound of the ratio of --use-rs (no bound)", above=0)
    rs_veto_threshold: float | None = flag(
        None, "--use-rs rejects samples with a token whose ratio is below this (no veto)", above=0, below=1
    )
    custom_tis_function_path: str | None = flag(
        None,
        "function that corrects the policy loss with --use-tis (dotted import path; the weight, and --use-rs)",
    )
    get_mismatch_metrics: bool = flag(
        False, "log KL and perplexities between engines and training for the same samples (train/mismatch_...)"
    )
    use_opsm: bool = flag(
        False, "off-policy sequence masking: mask off-policy samples with negative advantage (DeepSeek-V3.2)"
    )
    opsm_delta: float = flag(
        1e-4, "threshold of --use-opsm (mean of old minus new log-probability of a sample)", at_least=0
    )
    only_train_params_name_list: list[str] | None = flag(
        None,
        "train only weights whose Megatron name matches one of these regular expressions (all)",
        nargs="*",
        parse=_regular_expression,
    )
    freeze_params_name_list: list[str] | None = flag(
        None,
        "freeze weights whose Megatron name matches one of these regular expressions (none)",
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
        None, "function that may change a rank's part of a rollout before its optimizer steps (dotted import path)"
    )

    def trains_weight(self, name: str) -> bool:
        """Whether the two lists let the weight of this Megatron name be trained."""
        only = self.only_train_params_name_list
        patterns = (self.freeze_params_name_list or []) if only is None else only
        return any(re.search(pattern, name) for pattern in patterns) == (only is not None)

    @property
    def trains_on_pairs(self) -> bool:
        """True if the loss is one of preferences: of pairs of responses, or of labelled single ones."""
        return self.loss_type == "preference_loss"

    @property
    def trains_on_labels(self) -> bool:
        """True if the loss is that of single responses that are desirable or not."""
        row = PREFERENCE_LOSSES.get(self.preference_loss) if self.trains_on_pairs else None
        return row is not None and not row.compares

    @property
    def trains_reward_model(self) -> bool:
        """True if the trained model gives a reward instead of tokens."""
        return self.loss_type == "reward_model_loss"

    @property
    def compares_responses(self) -> bool:
        """True if the loss is that of a preferred response and the rejected ones beside it."""
        row = REWARD_MODEL_LOSSES.get(self.reward_model_loss) if self.trains_reward_model else None
        return (self.trains_on_pairs and not self.trains_on_labels) or (row is not None and row.compares)

    @property
    def is_supervised(self) -> bool:
        """True if the responses are given, and their rewards and advantages are not used."""
        return self.loss_type == "sft_loss" or self.trains_on_pairs or self.trains_reward_model

    @property
    def use_critic(self) -> bool:
        """True if a critic is trained beside the policy."""
        estimator = ESTIMATORS.get(self.advantage_estimator)  # None for one that the rules reject
        return estimator is not None and estimator.has_critic and self.compute_advantages_and_returns

    @property
    def use_reference(self) -> bool:
        """True if the reference model is needed: a KL penalty, a KL loss (even one that is only logged), or pairs."""
        row = PREFERENCE_LOSSES.get(self.preference_loss) if self.trains_on_pairs else None
        compares = row is not None and row.has_reference and not self.preference_reference_free
        return self.kl_coef != 0.0 or self.use_kl_loss or compares

    @property
    def has_reference_pass(self) -> bool:
        """True if log-probabilities of the reference model are computed."""
        return self.use_reference and (self.compute_advantages_and_returns or self.trains_on_pairs)
