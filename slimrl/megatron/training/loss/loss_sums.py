"""The sums that a loss gives, its metrics by name: from the loss of a micro-batch to the reduction over the step.

Names are those of `slimrl.observability.metrics.registry` under `train/`. Values are float64 scalars on the loss's
device; the host reads them only at the end of the step.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from slimrl.algorithms.reduction import masked_sum


@dataclasses.dataclass(frozen=True)
class LossMetricNames:
    """The metrics in `LossSums`, in its order."""

    weighted: tuple[str, ...]
    by_token: tuple[str, ...]
    maxima: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LossSums:
    """One micro-batch's terms of the step's sums; only `loss` carries a gradient."""

    loss: Tensor  # scalar
    count: Tensor  # int32 scalar: the divisor of the loss
    trained_tokens: Tensor  # float64 scalar
    weighted: dict[str, Tensor]  # summed like the loss, divided by `count`
    by_token: dict[str, Tensor]  # summed over trained tokens, divided by their number
    maxima: dict[str, Tensor]
    custom: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # from custom functions, divided by `count`

    @property
    def names(self) -> LossMetricNames:
        """The names of the metrics, without those of custom functions."""
        return LossMetricNames(tuple(self.weighted), tuple(self.by_token), tuple(self.maxima))


def summed(values: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    """Float64 scalars from [tokens] by name."""
    return {name: masked_sum(value.double(), weights.double()) for name, value in values.items()}
