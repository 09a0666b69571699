"""Training metrics: means over a rollout's samples, throughput, and the metrics of each optimizer step.

Sums are in float64 over the data-parallel ranks, so that the numbers are the same in every parallel layout. Every rank
gets the same values, except for the seconds. A custom metric must not take the name of a built-in one. Names are in
`slimrl.observability.metrics.registry`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.algorithms.losses import kl_estimate, sample_mean_weights, sampled_reverse_kl, sums_per_sample
from slimrl.algorithms.off_policy import effective_share
from slimrl.algorithms.preference_losses import means_by_label
from slimrl.arguments.flags.algorithm import AlgorithmArguments
from slimrl.data.train_batch import RolloutBatch
from slimrl.hooks import HookFailedError
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.training.forward_step import TrainTensors
from slimrl.megatron.training.loss.custom_loss import FLAG as CUSTOM_LOSS
from slimrl.megatron.training.loss.custom_loss import added_metrics
from slimrl.megatron.training.loss.loss_sums import LossMetricNames, LossSums
from slimrl.megatron.training.loss.policy_loss import PolicyLossConfig
from slimrl.models.model_size import FORWARD_AND_BACKWARD, forward_flops
from slimrl.models.model_spec import ModelSpec

CORRECT_REWARD = 1.0
_LARGEST_EXPONENT = 700.0  # exp of more overflows


class PhaseTimes:
    """Seconds of a rollout's phases on this rank; a phase ends when the device has finished its work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str, *, within: str | None = None) -> Iterator[None]:
        """Adds the time of a block; the phase `within` which it runs does not count it."""
        started = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - started
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        if within is not None:
            self._seconds[within] = self._seconds.get(within, 0.0) - seconds

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken


def rollout_metrics(
    algorithm: AlgorithmArguments,
    spec: ModelSpec,
    batch: RolloutBatch,
    columns: TrainTensors,
    returns: Tensor | None,
    entropy: Tensor | None,
    seconds: dict[str, float],
    parallel: ParallelState,
    *,
    log_correct_samples: bool,
    scored_rows: Sequence[int],
    reference_rows: Sequence[int],
    stored: Tensor | None,
) -> dict[str, float]:
    """Means over all samples, and speeds; equal on every rank except the seconds. Collective over data-parallel ranks.

    `scored_rows` and `reference_rows` are the samples in the passes of the policy and of the reference before training,
    `stored` (bool [samples]) those whose values of the reference were stored, None without such values. `returns` and
    `entropy` are float32 [response tokens] or None; `seconds` by phase (`PhaseTimes`).
    """
    of_every_sample = _plain_sums(batch)
    if stored is not None:
        of_every_sample["rollout/stored_ref_log_probs"] = float(stored.sum())
    sums = {
        "samples": float(len(batch)),
        "tokens": float(batch.total_lengths.sum()),
        "flops": _flops(spec, batch, range(len(batch))),
        "scored_flops": _flops(spec, batch, scored_rows),
        "reference_flops": _flops(spec, batch, reference_rows),
        **of_every_sample,
    }
    if algorithm.compute_advantages_and_returns:
        sums |= _policy_sums(algorithm, batch, columns, returns, entropy, log_correct_samples=log_correct_samples)
    values = torch.tensor(list(sums.values()), dtype=torch.float64, device=parallel.device)
    dist.all_reduce(values, group=parallel.dp_group)
    total = dict(zip(sums, values.tolist(), strict=True))
    samples, tokens, flops = (total.pop(name) for name in ("samples", "tokens", "flops"))
    scored_flops, reference_flops = total.pop("scored_flops"), total.pop("reference_flops")
    trained, correct = total.pop("trained", 0.0), total.pop("correct", 0.0)
    of_correct = total.pop("rollout/correct_entropy", 0.0)
    means = {name: value / max(samples if name in of_every_sample else trained, 1.0) for name, value in total.items()}
    if correct:
        means["rollout/correct_entropy"] = of_correct / correct
    work_of = {"teacher_log_probs": flops, "ref_log_probs": reference_flops, "log_probs": scored_flops}
    work_of["actor_train"] = FORWARD_AND_BACKWARD * flops
    return means | _speeds(seconds, tokens, work_of, parallel.world_size)


def _flops(spec: ModelSpec, batch: RolloutBatch, rows: Sequence[int]) -> float:
    """Of one forward pass over these samples."""
    chosen = torch.tensor(rows, dtype=torch.int64)
    return float(forward_flops(spec, batch.total_lengths[chosen].tolist(), int(batch.response_lengths[chosen].sum())))


def _plain_sums(batch: RolloutBatch) -> dict[str, float]:
    """Sums over all samples."""
    columns = {
        "rollout/rewards": batch.rewards.double(),
        "rollout/truncated": batch.truncated,
        "rollout/response_lengths": batch.response_lengths,
        "rollout/total_lengths": batch.total_lengths,
    }
    return {name: float(column.sum()) for name, column in columns.items()}


def _policy_sums(
    algorithm: AlgorithmArguments,
    batch: RolloutBatch,
    columns: TrainTensors,
    returns: Tensor | None,
    entropy: Tensor | None,
    *,
    log_correct_samples: bool,
) -> dict[str, float]:
    """Sums over samples with trained tokens of the means over their trained tokens."""
    mask, lengths = columns.loss_mask, batch.response_lengths.to(columns.loss_mask.device)
    weights = sample_mean_weights(mask, lengths).double()
    sample_of_token = torch.repeat_interleave(torch.arange(len(batch), device=mask.device), lengths)

    def per_sample(values: Tensor) -> Tensor:
        """Float64 [samples]."""
        weighted = values.masked_fill(mask == 0, 0.0).double() * weights
        return weighted.new_zeros(len(batch)).index_add_(0, sample_of_token, weighted)

    train, rollout = columns.train_log_probs, columns.rollout_log_probs
    trained = (per_sample(torch.ones_like(mask)) > 0).double()
    of_samples = {
        "trained": trained,
        "rollout/log_probs": per_sample(train),
        "rollout/rollout_log_probs": per_sample(rollout),
        "rollout/advantages": per_sample(columns.advantages),
    }
    if columns.ref_log_probs is not None:
        of_samples["rollout/ref_log_probs"] = per_sample(columns.ref_log_probs)
        of_samples["rollout/kl"] = per_sample(kl_estimate(train, columns.ref_log_probs, algorithm.kl_loss_type))
        if algorithm.kl_target is not None:
            of_samples["rollout/sample_kl"] = of_samples["rollout/kl"] * sums_per_sample((mask != 0).double(), lengths)
    if columns.teacher_log_probs is not None:
        of_samples["rollout/teacher_log_probs"] = per_sample(columns.teacher_log_probs)
        gap = sampled_reverse_kl(columns.old_log_probs, columns.teacher_log_probs)
        of_samples["rollout/opd_reverse_kl"] = per_sample(gap)
    if returns is not None:
        of_samples["rollout/returns"] = per_sample(returns)
    if columns.values is not None:
        of_samples["rollout/values"] = per_sample(columns.values)
    if entropy is not None:
        of_samples["rollout/entropy"] = per_sample(entropy)
        if log_correct_samples:
            correct = (batch.raw_rewards >= CORRECT_REWARD).to(mask.device).double() * trained
            of_samples |= {"correct": correct, "rollout/correct_entropy": of_samples["rollout/entropy"] * correct}
    if algorithm.get_mismatch_metrics:
        of_samples |= _mismatch(per_sample(train), per_sample(rollout), per_sample(_k3(train, rollout)))
    sums = torch.stack([(values * trained).sum() for values in of_samples.values()])
    return dict(zip(of_samples, sums.tolist(), strict=True))


def _k3(train: Tensor, rollout: Tensor) -> Tensor:
    """exp(d) - 1 - d, d = train - rollout: the KL of the engines' policy, which sampled, to training's."""
    gap = train - rollout
    return gap.expm1() - gap


def _mismatch(train: Tensor, rollout: Tensor, k3: Tensor) -> dict[str, Tensor]:
    """From mean log-probabilities, float64 [samples]; names without prefix are the first optimizer step's."""
    return {
        "mismatch_kl": rollout - train,
        "mismatch_k3_kl": k3,
        "mismatch_training_ppl": (-train).exp(),
        "mismatch_rollout_ppl": (-rollout).exp(),
        "mismatch_log_ppl_abs_diff": (train - rollout).abs(),
    }


def _speeds(seconds: dict[str, float], tokens: float, flops: dict[str, float], world_size: int) -> dict[str, float]:
    """`flops` by phase; a phase that did not run has no speed."""
    found = {f"perf/{name}_time": value for name, value in seconds.items()}
    for name, work in flops.items():
        if name in seconds:
            found[f"perf/{name}_tflops"] = work / seconds[name] / world_size / 1e12
    if "actor_train" in seconds:
        found["perf/actor_train_tok_per_s"] = tokens / seconds["actor_train"]
    return found


def step_counts(batch: RolloutBatch) -> list[dict[str, float]]:
    """Samples and trained tokens of each optimizer step, over all data-parallel ranks."""
    return [
        {"samples": float(samples), "global_batch_size": float(samples), "tokens": float(tokens)}
        for samples, tokens in zip(batch.samples_per_step, batch.tokens_per_step, strict=True)
    ]


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
