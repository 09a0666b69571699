"""The metrics of a loss by name, from where a micro-batch's loss computes them to where the step's are reduced.

A name is the one that `slimrl.observability.metrics.registry` has under `train/`. Values are float64 scalars on the
loss's device, which the host does not read before the step's end.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from slimrl.algorithms.reduction import masked_sum


@dataclasses.dataclass(frozen=True)
class LossMetricNames:
    """The metrics that `PolicyLossSums` holds, in its order."""

    weighted: tuple[str, ...]
    by_token: tuple[str, ...]
    maxima: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PolicyLossSums:
    """What one micro-batch adds to the step; only `loss` carries a gradient."""

    loss: Tensor  # scalar
    count: Tensor  # int32 scalar: what the loss is divided by
    trained_tokens: Tensor  # float64 scalar
    weighted: dict[str, Tensor]  # summed as the loss is, divided by `count`
    by_token: dict[str, Tensor]  # summed over trained tokens, divided by their number
    maxima: dict[str, Tensor]
    own: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # by a function of the user's, divided by `count`

    @property
    def names(self) -> LossMetricNames:
        """The names of the metrics, those of the user's functions left out."""
        return LossMetricNames(tuple(self.weighted), tuple(self.by_token), tuple(self.maxima))


def summed(values: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    """Float64 scalars from [tokens] by name."""
    return {name: masked_sum(value.double(), weights.double()) for name, value in values.items()}
