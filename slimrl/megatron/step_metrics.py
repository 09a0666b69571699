"""Adds up what micro-batches and data-parallel ranks report about one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from slimrl.megatron.loss import MAXIMUM_NAMES, TOKEN_NAMES, WEIGHTED_NAMES, PolicyLossSums


def reduce_step(sums: Sequence[PolicyLossSums], group: dist.ProcessGroup) -> dict[str, float]:
    """The step's metrics by name, equal on every rank; collective over `group`, the data-parallel ranks.

    Sums are added in float64, so that the numbers printed do not depend on the cut of the batch.
    """
    totals = torch.stack(
        [torch.cat([entry.count.double().reshape(1), entry.weighted, entry.by_token]) for entry in sums]
    ).sum(0)
    maxima = torch.stack([entry.maxima for entry in sums]).amax(0)
    if group.size() > 1:
        dist.all_reduce(totals, group=group)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    count, *numbers = totals.tolist()
    weighted, by_token = numbers[: len(WEIGHTED_NAMES)], numbers[len(WEIGHTED_NAMES) :]
    tokens = by_token.pop()
    metrics = {name: value / max(count, 1.0) for name, value in zip(WEIGHTED_NAMES, weighted, strict=True)}
    metrics |= {name: value / max(tokens, 1.0) for name, value in zip(TOKEN_NAMES, by_token, strict=True)}
    metrics |= dict(zip(MAXIMUM_NAMES, maxima.tolist(), strict=True))
    return metrics | {"tokens": tokens}
