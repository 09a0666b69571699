"""The sums that a loss gives, its metrics by name: from the loss of a micro-batch to the reduction over the step.

Names are those of `slimrl.observability.metrics.registry` under `train/`. Values are float64 scalars on the loss's
device; the host reads them only at the end of the step.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from slimrl.algorithms.losses import masked_sum
from slimrl.algorithms.off_policy import NO_CORRECTION, Correction


@dataclasses.dataclass(frozen=True)
class LossMetricNames:
    """The metrics in `LossSums`, in its order."""

    weighted: tuple[str, ...]
    by_token: tuple[str, ...]
    maxima: tuple[str, ...]
    by_sample: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class LossSums:
    """One micro-batch's terms of the step's sums; only `loss` carries a gradient."""

    loss: Tensor  # scalar
    count: Tensor  # int32 scalar: the divisor of the loss
    trained_tokens: Tensor  # float64 scalar
    weighted: dict[str, Tensor]  # summed like the loss, divided by `count`
    by_token: dict[str, Tensor]  # summed over trained tokens, divided by their number
    maxima: dict[str, Tensor]
    by_sample: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # summed, divided by `trained_samples`
    trained_samples: Tensor | None = None  # float64 scalar: samples with trained tokens; None without `by_sample`
    custom: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # from custom functions, divided by `count`

    @property
    def names(self) -> LossMetricNames:
        """The names of the metrics, without those of custom functions."""
        return LossMetricNames(tuple(self.weighted), tuple(self.by_token), tuple(self.maxima), tuple(self.by_sample))


def summed(values: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    """Float64 scalars from [tokens] by name."""
    return {name: masked_sum(value.double(), weights.double()) for name, value in values.items()}


def named_sums(
    loss: Tensor,
    count: Tensor,
    trained_tokens: Tensor,
    weighted: dict[str, Tensor],
    *,
    mismatch: Tensor | None = None,
    ratio_gap: Tensor | None = None,
    correction: Correction = NO_CORRECTION,
    custom: dict[str, Tensor] | None = None,
) -> LossSums:
    """The sums of any loss. `mismatch` is |train - rollout log-probability|, `ratio_gap` |policy / old policy - 1|.

    Both are [tokens], 0 where masked. A loss without them reports 0. `correction` adds its sums.
    """
    none = torch.zeros(0, dtype=torch.float64, device=trained_tokens.device)
    mismatch = none if mismatch is None else mismatch
    ratio_gap = none if ratio_gap is None else ratio_gap
    return LossSums(
        loss=loss,
        count=count.to(torch.int32),
        trained_tokens=trained_tokens.double(),
        weighted=weighted,
        by_token={"train_rollout_logprob_abs_diff_mean": mismatch.double().sum()} | correction.by_token,
        by_sample=correction.by_sample,
        trained_samples=correction.trained_samples,
        maxima={
            "ratio_max_abs_diff": _largest(ratio_gap).double(),
            "train_rollout_logprob_abs_diff_max": _largest(mismatch).double(),
        },
        custom=custom or {},
    )


def _largest(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.new_zeros(())
