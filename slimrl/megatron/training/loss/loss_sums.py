"""The sums that a loss gives, its metrics by name: from the loss of a micro-batch to the metrics of the step.

Names are those of `slimrl.observability.metrics.registry` under `train/`. Values are float64 scalars on the loss's
device; the host reads them only at the end of the step. They are added in float64 over micro-batches and data-parallel
ranks, so that the numbers are the same in every parallel layout. A custom metric must not take the name of a built-in
one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.algorithms.losses import masked_sum
from slimrl.algorithms.off_policy import NO_CORRECTION, Correction, effective_share
from slimrl.algorithms.preference_losses import means_by_label
from slimrl.hooks import HookFailedError
from slimrl.megatron.parallel import ParallelState

if TYPE_CHECKING:
    from slimrl.megatron.training.loss.policy_loss import PolicyLossConfig


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


CUSTOM_LOSS = "--custom-loss-function-path"


def added_metrics(all_sums: list[LossSums]) -> dict[str, float]:
    """The custom metrics summed over a rank's micro-batches. Raises HookFailedError if their names differ."""
    names = {frozenset(sums.custom) for sums in all_sums}
    if len(names) > 1:
        odd = sorted(frozenset.union(*names) - frozenset.intersection(*names))
        raise HookFailedError(f"custom metrics {', '.join(odd)} were returned for some micro-batches only")
    return {name: math.fsum(float(sums.custom[name]) for sums in all_sums) for name in sorted(next(iter(names), ()))}


_LARGEST_EXPONENT = 700.0  # exp of more overflows
# metrics that the trainer and the driver add to a step later
_RESERVED_NAMES = ("step", "grad_norm", "lr", "skipped", "samples", "global_batch_size", "tokens")
_RESERVED_NAMES_FAMILIES = ("lr-pg_", "memory_", "planned_memory_", "critic-")


def reduce_step(sums: Sequence[LossSums], settings: PolicyLossConfig, parallel: ParallelState) -> dict[str, float]:
    """The step's metrics by name, equal on every rank; collective over all ranks.

    `sums` are those of this rank's micro-batches, computed with `settings`; only the last pipeline stage's are read.
    They are added in float64, so that printed numbers do not depend on the split of the batch. Raises HookFailedError,
    on every rank, if a custom metric has the name of a built-in one.
    """
    names = settings.metric_names
    reduced = _reduced(sums, names, parallel)
    metrics = _means(reduced, names)
    if not settings.needs_old_log_probs:
        metrics = {name: metrics[name] for name in names.weighted}
    if settings.supervised:
        metrics["perplexity"] = math.exp(metrics["loss"]) if metrics["loss"] < _LARGEST_EXPONENT else math.inf
    if settings.is_custom_loss:
        metrics.pop("ratio_max_abs_diff", None)  # a custom loss may use another ratio
    if "desirable_share" in metrics:
        metrics = means_by_label(metrics)
    if "tis_weight" in metrics:
        metrics["tis_ess"] = effective_share(metrics["tis_weight"], metrics["tis_weight_square"])
    if settings.is_custom_loss or settings.loss_hooks.correction is not None:
        own = _custom_metrics(sums, parallel)
        _check_names(own, metrics, settings)
        metrics |= {name: value / max(reduced["count"], 1.0) for name, value in own.items()}
    return metrics | {"tokens": reduced["tokens"]}


def reduce_sums(sums: Sequence[LossSums], names: LossMetricNames, parallel: ParallelState) -> dict[str, float]:
    """The metrics `names` of a step, equal on every rank; collective over all ranks.

    `sums` are those of this rank's micro-batches; only the last pipeline stage's are read.
    """
    return _means(_reduced(sums, names, parallel), names)


def _means(reduced: dict[str, float], names: LossMetricNames) -> dict[str, float]:
    count, tokens = max(reduced["count"], 1.0), max(reduced["tokens"], 1.0)
    samples = max(reduced["trained_samples"], 1.0)
    return {
        **{name: reduced[name] / count for name in names.weighted},
        **{name: reduced[name] / tokens for name in names.by_token},
        **{name: reduced[name] / samples for name in names.by_sample},
        **{name: reduced[name] for name in names.maxima},
    }


def _reduced(sums: Sequence[LossSums], names: LossMetricNames, parallel: ParallelState) -> dict[str, float]:
    """The metrics by name, summed or maximised over micro-batches and ranks, with the numbers that divide them."""
    of_totals = ("count", *names.weighted, *names.by_token, *names.by_sample, "tokens", "trained_samples")
    sizes = [len(of_totals), len(names.maxima)]
    values = torch.zeros(sum(sizes), dtype=torch.float64, device=parallel.device)
    if parallel.is_last_stage:
        totals, maxima = values.split(sizes)
        for entry in sums:
            if entry.names != names:
                raise ValueError(f"a micro-batch's loss has the metrics {entry.names}, and its settings {names}")
            samples = torch.zeros_like(totals[0]) if entry.trained_samples is None else entry.trained_samples
            added = {"count": entry.count, "tokens": entry.trained_tokens, "trained_samples": samples}
            added |= {**entry.weighted, **entry.by_token, **entry.by_sample}
            totals += torch.stack([added[name].double() for name in of_totals])
            if names.maxima:
                torch.maximum(maxima, torch.stack([entry.maxima[name] for name in names.maxima]), out=maxima)
        if parallel.dp_size > 1:
            dist.all_reduce(totals, group=parallel.dp_group)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=parallel.dp_group)
    return dict(zip((*of_totals, *names.maxima), parallel.from_last_stage(values).tolist(), strict=True))


def _check_names(own: Iterable[str], metrics: Iterable[str], settings: PolicyLossConfig) -> None:
    """Raise HookFailedError if a custom metric would replace a built-in one."""
    where = CUSTOM_LOSS if settings.is_custom_loss else settings.loss_hooks.correction_name
    taken = {*metrics, *_RESERVED_NAMES}
    for name in own:
        if "/" in name:
            raise HookFailedError(f"{where} returned a metric {name}, which names another section: leave the / out")
        if name in taken or name.startswith(_RESERVED_NAMES_FAMILIES):
            raise HookFailedError(f"{where} returned a metric {name}, which slimrl logs: give another name")


def _custom_metrics(sums: Sequence[LossSums], parallel: ParallelState) -> dict[str, float]:
    """Custom metrics summed over all ranks; only the last stages know their names."""
    counts = parallel.is_last_stage and parallel.tp_rank == parallel.cp_rank == 0
    of_ranks: list[dict[str, float]] = [{} for _ in range(parallel.world_size)]
    dist.all_gather_object(of_ranks, added_metrics(list(sums)) if counts else {})
    return {
        name: math.fsum(own.get(name, 0.0) for own in of_ranks)
        for name in sorted({key for own in of_ranks for key in own})
    }
