"""Adds up what micro-batches and data-parallel ranks report about one optimizer step, and tells every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from slimrl.hooks import HookFailedError
from slimrl.megatron.loss import MAXIMUM_NAMES, TOKEN_NAMES, PolicyLossSettings, PolicyLossSums
from slimrl.megatron.own_loss import FLAG as CUSTOM_LOSS
from slimrl.megatron.own_loss import added_metrics
from slimrl.megatron.parallel import ParallelState

# what the trainer and the driver add to a step's metrics afterwards
_LATER = ("step", "grad_norm", "lr", "skipped", "samples", "global_batch_size", "tokens")
_LATER_FAMILIES = ("lr-pg_", "memory_", "planned_memory_")


def reduce_step(
    sums: Sequence[PolicyLossSums], settings: PolicyLossSettings, parallel: ParallelState
) -> dict[str, float]:
    """The step's metrics by name, equal on every rank; collective over all ranks.

    `sums` are this rank's micro-batches, made with `settings`, of interest only on the last pipeline stage. They are
    added in float64, so that the numbers printed do not depend on the cut of the batch. Raises HookFailedError, on
    every rank, where a metric of a function of the user's has a name that is taken.
    """
    weighted_names = settings.weighted_names
    count_of_totals = 1 + len(weighted_names) + len(TOKEN_NAMES) + 1  # the count, the sums, the trained tokens
    values = torch.zeros(count_of_totals + len(MAXIMUM_NAMES), dtype=torch.float64, device=parallel.device)
    if parallel.is_last_stage:
        totals, maxima = values.split([count_of_totals, len(MAXIMUM_NAMES)])
        for entry in sums:
            totals += torch.cat([entry.count.double().reshape(1), entry.weighted, entry.by_token])
            torch.maximum(maxima, entry.maxima, out=maxima)
        if parallel.dp_size > 1:
            dist.all_reduce(totals, group=parallel.dp_group)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=parallel.dp_group)
    totals, maxima = parallel.from_last_stage(values).split([count_of_totals, len(MAXIMUM_NAMES)])
    count, *numbers = totals.tolist()
    weighted, by_token = numbers[: len(weighted_names)], numbers[len(weighted_names) :]
    tokens = by_token.pop()
    metrics = {name: value / max(count, 1.0) for name, value in zip(weighted_names, weighted, strict=True)}
    if settings.compares_policies:
        metrics |= {name: value / max(tokens, 1.0) for name, value in zip(TOKEN_NAMES, by_token, strict=True)}
        metrics |= dict(zip(MAXIMUM_NAMES, maxima.tolist(), strict=True))
    if settings.own:
        metrics.pop("ratio_max_abs_diff", None)  # its ratio, if it has one, is its own
    if settings.own or settings.own_parts.correction is not None:
        own = _own_metrics(sums, parallel)
        _check_names(own, metrics, settings)
        metrics |= {name: value / max(count, 1.0) for name, value in own.items()}
    return metrics | {"tokens": tokens}


def _check_names(own: Iterable[str], metrics: Iterable[str], settings: PolicyLossSettings) -> None:
    """A user's metric must not take the place of one of slimrl's, which the run is judged and guarded by."""
    where = CUSTOM_LOSS if settings.own else settings.own_parts.correction_name
    taken = {*metrics, *_LATER}
    for name in own:
        if "/" in name:
            raise HookFailedError(f"{where} returned a metric {name}, which names another section: leave the / out")
        if name in taken or name.startswith(_LATER_FAMILIES):
            raise HookFailedError(f"{where} returned a metric {name}, which slimrl logs: give another name")


def _own_metrics(sums: Sequence[PolicyLossSums], parallel: ParallelState) -> dict[str, float]:
    """What functions of the user's report, whose names only the last stages know, added up over all ranks."""
    counts = parallel.is_last_stage and parallel.tp_rank == parallel.cp_rank == 0
    of_ranks: list[dict[str, float]] = [{} for _ in range(parallel.world_size)]
    dist.all_gather_object(of_ranks, added_metrics(list(sums)) if counts else {})
    return {
        name: math.fsum(own.get(name, 0.0) for own in of_ranks)
        for name in sorted({key for own in of_ranks for key in own})
    }
