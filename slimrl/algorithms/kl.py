"""Per-token estimators of KL(policy || reference) from the log-probabilities of sampled tokens."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

# Bound of the relative error of `next_kl_coef`.
_MAX_KL_ERROR = 0.2

KLKind = Literal["k1", "k2", "k3", "low_var_kl"]

# Beyond this log-ratio k3 is far above its clamp, and exp would overflow and give NaN gradients.
_MAX_LOG_RATIO = 20.0
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
