"""Flags of the learning rule: advantages, policy loss, KL."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class AlgorithmArguments:
    """Advantages and losses."""

    advantage_estimator: str = flag("grpo", "how rewards become advantages", choices=("grpo",))
    loss_type: str = flag("policy_loss", "what is minimised", choices=("policy_loss",))
    eps_clip: float = flag(0.2, "the policy ratio is clipped below at 1 - this", at_least=0)
    eps_clip_high: float | None = flag(None, "the policy ratio is clipped above at 1 + this (--eps-clip)", at_least=0)
    eps_clip_c: float | None = flag(
        None, "bound of the dual clip for negative advantages, above 1 (no dual clip)", above=1
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    use_kl_loss: bool = flag(False, "add the KL to the reference as a loss; with coefficient 0 it is only logged")
    kl_loss_coef: float = flag(0.0, "weight of the KL loss")
    kl_loss_type: str = flag(
        "k1", "KL estimator of the loss and of --kl-coef", choices=("k1", "k2", "k3", "low_var_kl")
    )
    kl_coef: float = flag(0.0, "weight of the KL penalty inside the advantage; needs --ref-load")
    normalize_advantages: bool = flag(False, "whiten advantages over the trained tokens of the rollout")
    grpo_std_normalization: bool = flag(
        True,
        "do not divide by the group's standard deviation (Dr. GRPO)",
        only_off=True,
        off=("--disable-grpo-std-normalization",),
    )
    rewards_normalization: bool = flag(
        True,
        "use rewards as they are: no group mean, no group deviation",
        only_off=True,
        off=("--disable-rewards-normalization",),
    )
    calculate_per_token_loss: bool = flag(False, "mean over all tokens of the step (mean of the samples' means)")
    use_rollout_logprobs: bool = flag(False, "the engines' log-probabilities as the old policy (recomputed ones)")

    @property
    def use_reference(self) -> bool:
        """True where the reference model is needed: a KL penalty, or a KL loss (even one that is only logged)."""
        return self.kl_coef != 0.0 or self.use_kl_loss
