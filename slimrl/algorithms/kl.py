"""Per-token estimators of KL(policy || reference) from the log-probabilities of sampled tokens."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

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
