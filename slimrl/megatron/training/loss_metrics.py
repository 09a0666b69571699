"""The metrics of a loss by name, from where a micro-batch's loss computes them to where the step's are reduced.

A name is the one that `slimrl.observability.metrics.registry` has under `train/`. Values are float64 scalars on the
loss's device, which the host does not read before the step's end.
"""

from __future__ import annotations

import dataclasses

import torch
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


def named_sums(
    loss: Tensor,
    count: Tensor,
    trained_tokens: Tensor,
    weighted: dict[str, Tensor],
    *,
    mismatch: Tensor | None = None,
    ratio_gap: Tensor | None = None,
    own: dict[str, Tensor] | None = None,
) -> PolicyLossSums:
    """The sums of any loss. `mismatch` is |train - rollout log-probability|, `ratio_gap` |policy / old policy - 1|.

    Both are [tokens], 0 where masked; a loss that does without them reports 0.
    """
    none = torch.zeros(0, dtype=torch.float64, device=trained_tokens.device)
    mismatch = none if mismatch is None else mismatch
    ratio_gap = none if ratio_gap is None else ratio_gap
    return PolicyLossSums(
        loss=loss,
        count=count.to(torch.int32),
        trained_tokens=trained_tokens.double(),
        weighted=weighted,
        by_token={"train_rollout_logprob_abs_diff_mean": mismatch.double().sum()},
        maxima={
            "ratio_max_abs_diff": _largest(ratio_gap).double(),
            "train_rollout_logprob_abs_diff_max": _largest(mismatch).double(),
        },
        own=own or {},
    )


def summed(values: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    """Float64 scalars from [tokens] by name."""
    return {name: masked_sum(value.double(), weights.double()) for name, value in values.items()}


def _largest(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.new_zeros(())
