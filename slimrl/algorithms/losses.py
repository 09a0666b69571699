"""Per-token losses (policy gradient, KL to a reference, critic, teacher) and their reductions.

Policy gradients are PPO with an asymmetric clip and an optional dual clip, and CISPO. Reductions return sums, never
means: the caller divides by a count that is global over micro-batches and ranks, so that the result does not depend on
how the batch was split.

On-policy distillation learns from the log-probabilities that a teacher gives to the tokens that the student sampled.
The reverse KL of a sequence is E_{y ~ student} sum_t [log student(y_t | y_<t) - log teacher(y_t | y_<t)]; its sampled
terms, with the sign of a reward, are the advantages of a policy gradient (on-policy data and the reverse KL of Agarwal
et al. 2024, arXiv:2306.13649; in this form Lu 2025, "On-Policy Distillation", Thinking Machines Lab). No term is
discounted into earlier tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import torch
from torch import Tensor

# exp(20) is far outside every clip range; larger arguments overflow, and inf * 0 makes the gradient NaN.
_MAX_LOG_RATIO = 20.0


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """Per-token results, each of the shape of the log-probabilities."""

    loss: Tensor  # to be minimised; differentiable in log_probs
    clipped: Tensor  # float, 1 where the clip is active (no gradient flows)
    ratio: Tensor  # policy / old policy, detached


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """`exp(log_probs - old_log_probs)`, differentiable in `log_probs` and bounded far outside every clip range."""
    return (log_probs - old_log_probs.detach()).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> PolicyLoss:
    """`-min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_high) A)` with `r = exp(log_probs - old_log_probs)`.

    Schulman et al. 2017 (PPO), equation 7; the separate upper bound is DAPO's clip-higher (Yu et al. 2025).
    With `eps_clip_c` (> 1) the loss of tokens with A < 0 is at most `-eps_clip_c * A` (dual clip, Ye et
    al. 2020, equation 5), so that a very large ratio cannot dominate. All tensors have the same shape;
    `old_log_probs` and `advantages` get no gradient.

    Raises ValueError if eps_clip_c is not above 1.
    """
    if eps_clip_c is not None and eps_clip_c <= 1.0:
        raise ValueError(f"--eps-clip-c is {eps_clip_c} and must be above 1: it bounds the ratio from above")
    advantages = advantages.detach()
    ratio = importance_ratio(log_probs, old_log_probs)
    unclipped_loss = -ratio * advantages
    clipped_loss = -ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high) * advantages
    loss = torch.maximum(unclipped_loss, clipped_loss)
    clipped = clipped_loss > unclipped_loss
    if eps_clip_c is not None:
        bound = -eps_clip_c * advantages
        over = (advantages < 0) & (loss > bound)
        loss = torch.where(over, bound, loss)
        clipped = clipped | over
    return PolicyLoss(loss=loss, clipped=clipped.detach().to(loss.dtype), ratio=ratio.detach())


def cispo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, eps_clip: float, eps_clip_high: float
) -> PolicyLoss:
    """`-sg(clip(r, 1 - eps_clip, 1 + eps_clip_high)) A log_probs` with `r` as in PPO and sg the stop-gradient.

    MiniMax-M1 (2025), equations 4 and 5. The clip bounds a token's weight and never removes its gradient; `clipped` is
    1 where the weight was bounded.
    """
    ratio = importance_ratio(log_probs, old_log_probs).detach()
    weight = ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high)
    loss = -weight * advantages.detach() * log_probs
    return PolicyLoss(loss=loss, clipped=(weight != ratio).to(loss.dtype), ratio=ratio)


# Bound of the relative error of `next_kl_coef`.
_MAX_KL_ERROR = 0.2

KLKind = Literal["k1", "k2", "k3", "low_var_kl"]

# Beyond this log-ratio k3 is far above its clamp, and exp would overflow and give NaN gradients.
_MAX_LOW_VAR_KL = 10.0


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: KLKind) -> Tensor:
    """Estimate KL(policy || reference) token by token; same shape as `log_probs`, differentiable in it.

    With `d = log_probs - ref_log_probs` (J. Schulman, "Approximating KL Divergence", 2020):

    - `k1`: `d`. Unbiased, high variance, may be negative.
    - `k2`: `d**2 / 2`. Biased, low variance, never negative.
    - `k3`: `exp(-d) - 1 + d`. Unbiased, low variance, never negative.
    - `low_var_kl`: `k3` clamped to [-10, 10], so that one outlier token cannot dominate the loss.

    Raises ValueError for any other `kind`.
    """
    difference = log_probs - ref_log_probs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        return torch.expm1(-difference) + difference
    if kind == "low_var_kl":
        bounded = difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        return (torch.expm1(-bounded) + bounded).clamp(-_MAX_LOW_VAR_KL, _MAX_LOW_VAR_KL)
    raise ValueError(f"unknown KL estimator {kind!r}: choose one of {', '.join(get_args(KLKind))}")


def next_kl_coef(coef: float, kl: float, *, target: float, samples: int, horizon: float) -> float:
    """The coefficient of the KL penalty after `samples` samples with a mean KL of `kl`.

    `coef * (1 + e * samples / horizon)` with `e = clip(kl / target - 1, -0.2, 0.2)`: Ziegler et al. 2019, section 2.2,
    whose gain K of a step is `samples / horizon`. `kl` and `target` in nats per response.
    """
    error = min(max(kl / target - 1.0, -_MAX_KL_ERROR), _MAX_KL_ERROR)
    return coef * (1.0 + error * samples / horizon)


def next_entropy_coef(coef: float, entropy: float, *, target: float, delta: float) -> float:
    """The coefficient of the entropy bonus after a rollout with this mean entropy, in nats per token.

    It rises by `delta` while the entropy is below `target` and falls by it above: He et al. 2025 (Skywork-OR1,
    arXiv:2505.22312), adaptive entropy control. It does not fall below 0, where the bonus would be a penalty.
    """
    if entropy == target:
        return coef
    return max(coef + (delta if entropy < target else -delta), 0.0)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, value_clip: float
) -> tuple[Tensor, Tensor]:
    """`max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2)` per token, and where it is clipped.

    The clip is that of PPO's reference implementation (Dhariwal et al. 2017, OpenAI Baselines; described by Engstrom et
    al. 2020, "Implementation Matters in Deep Policy Gradients", section 3): a value that moved further than
    `value_clip` from the one before the rollout gets no gradient, unless it moved away from its return. Without the
    factor 1/2, as in slime. All tensors [tokens]; differentiable in `values` only. The second result is float, 1 where
    `|V - V_old| > value_clip`.
    """
    old_values, returns = old_values.detach(), returns.detach()
    moved = values - old_values
    clipped = old_values + moved.clamp(-value_clip, value_clip)
    loss = torch.maximum((values - returns).square(), (clipped - returns).square())
    return loss, (moved.abs() > value_clip).to(loss.dtype)


@dataclasses.dataclass(frozen=True)
class TeacherTerm:
    """The teacher's `log_probs`, float32 [response tokens], and the weight of the reverse KL to it."""

    log_probs: Tensor
    kl_coef: float

    def penalty(self, student: Tensor, mask: Tensor) -> Tensor:
        """What is subtracted from the advantages: kl_coef * (student - teacher), [response tokens]; 0 where masked.

        `student` has the log-probabilities of the same tokens under the policy that they were sampled from.
        """
        return (self.kl_coef * sampled_reverse_kl(student, self.log_probs)).masked_fill(mask == 0, 0.0)


def sampled_reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """log student - log teacher of the sampled tokens, in nats.

    Its mean over samples of the student is KL(student || teacher): the estimator k1 of Schulman 2020
    (http://joschu.net/blog/kl-approx.html).
    """
    return student - teacher


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` [tokens] weighted by `mask` [tokens]; masked values are ignored, even NaN."""
    return (values.masked_fill(mask == 0, 0.0) * mask).sum()


def sample_mean_weights(mask: Tensor, lengths: Tensor) -> Tensor:
    """Weights [tokens] such that `(weights * values).sum()` is the sum over samples of the masked mean.

    `mask` [tokens] holds samples end to end; `lengths` [n] (integers) is the number of tokens of each.
    A fully masked sample gets weight 0 everywhere. Raises ValueError if lengths in host memory do not add up to the
    size of the mask. Lengths on a device are not checked, because reading them would synchronize host and device.
    """
    if lengths.device.type == "cpu" and int(lengths.sum()) != mask.numel():
        raise ValueError(f"the lengths add up to {int(lengths.sum())} tokens and the mask has {mask.numel()}")
    lengths = lengths.to(mask.device)
    rows = torch.arange(lengths.numel(), device=mask.device)
    sample_of_token = torch.repeat_interleave(rows, lengths, output_size=mask.numel())
    # Sums of 0/1 are exact in float32, so index_add's order of addition does not matter.
    counts = mask.new_zeros(lengths.numel()).index_add_(0, sample_of_token, mask)
    counts = torch.where(counts > 0, counts, 1.0)
    return mask / counts[sample_of_token]


def sums_per_sample(values: Tensor, lengths: Tensor) -> Tensor:
    """The sum of each sample's `values` [tokens], which holds samples of these `lengths` end to end; [n]."""
    lengths = lengths.to(values.device)
    rows = torch.arange(lengths.numel(), device=values.device)
    sample_of_token = torch.repeat_interleave(rows, lengths, output_size=values.numel())
    return values.new_zeros(lengths.numel()).index_add(0, sample_of_token, values)


def masked_mean_per_sample_sum(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Sum over samples of the mean of their unmasked `values`; a fully masked sample contributes 0.

    `values` and `mask` [tokens] hold samples end to end; `lengths` [n]. Returns a scalar, differentiable in `values`.
    """
    return masked_sum(values, sample_mean_weights(mask, lengths))
