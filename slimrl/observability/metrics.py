"""The numbers that the trainer reports per optimizer step: what each means, and how steps of a rollout combine.

The one list of these names; the docs are checked against it. Other names (a custom loss's own) are averaged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Metric:
    """`combine` says what several optimizer steps of one rollout become in `summary.json`."""

    meaning: str
    combine: Literal["mean", "max", "sum", "last"] = "mean"


TRAIN_METRICS = {
    "loss": Metric("what is minimised: pg_loss - entropy_coef * entropy_loss + kl_loss_coef * kl_loss"),
    "pg_loss": Metric("clipped policy-gradient loss"),
    "entropy_loss": Metric("mean entropy of the policy's next-token distributions (nats)"),
    "pg_clipfrac": Metric("share of tokens whose loss a clip decided"),
    "ppo_kl": Metric("mean of old - new log-probability (nats): how far this rollout's steps have moved"),
    "kl_loss": Metric("KL to the reference model by --kl-loss-type (nats); 0 without a reference"),
    "ratio_mean": Metric("mean of policy / old policy; 1 in the first optimizer step"),
    "ratio_max_abs_diff": Metric("largest |ratio - 1| of any token", "max"),
    "train_rollout_logprob_abs_diff_mean": Metric("mean |train - rollout log-probability| over trained tokens (nats)"),
    "train_rollout_logprob_abs_diff_max": Metric("largest such difference of any trained token (nats)", "max"),
    "tis": Metric("mean of training's over the engines' probability, the weight of --use-tis before its bounds"),
    "tis_clipfrac": Metric("share of tokens whose weight a bound decided"),
    "tis_abs": Metric("mean distance of that weight from 1"),
    "opsm_clipfrac": Metric("share of tokens that --use-opsm left out"),
    "grad_norm": Metric("norm of the gradient over all parameters, before clipping"),
    "lr": Metric("learning rate of the optimizer step", "last"),
    "skipped": Metric("optimizer steps not taken because loss or gradient was not finite", "sum"),
    "tokens": Metric("trained tokens, over all data-parallel ranks", "sum"),
    "memory_parameters": Metric("weights on the rank that holds most of them (bytes); with a run's first step", "max"),
    "memory_gradients": Metric("the same of gradient buffers", "max"),
    "memory_optimizer": Metric("the same of the optimizer's state", "max"),
    "memory_activations": Metric("the same of activations, at their peak; on GPUs with every step", "max"),
    "planned_memory_parameters": Metric("what --dry-run estimates for memory_parameters (bytes)", "max"),
    "planned_memory_gradients": Metric("for memory_gradients", "max"),
    "planned_memory_optimizer": Metric("for memory_optimizer", "max"),
    "planned_memory_activations": Metric("for memory_activations, with micro-batches of this size", "max"),
}
_AVERAGED = Metric("")


def combine_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """One number per name from the optimizer steps of one rollout; a single step comes back unchanged."""
    if len(steps) == 1:
        return dict(steps[0])
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: _combine(name, [step[name] for step in steps if name in step]) for name in names}


def _combine(name: str, values: list[float]) -> float:
    rule = TRAIN_METRICS.get(name, _AVERAGED).combine
    if rule == "max":
        # max() of a list with NaN depends on its order; a NaN must not be hidden.
        return math.nan if any(math.isnan(value) for value in values) else max(values)
    if rule == "sum":
        return math.fsum(values)
    if rule == "last":
        return values[-1]
    return sum(values) / len(values)
