"""What a training rank reports of a rollout: means over its samples, throughput, seconds, and the dump of its data.

Sums are in float64 over the data-parallel ranks, so that the numbers are the same in every parallel layout. Every rank
gets the same values, except for the seconds. Names are in `slimrl.observability.metrics.registry`.

`--save-debug-train-data` writes every sample with the columns that the loss reads besides the model, before the first
optimizer step; `torch.load(path, weights_only=True)` reads it. The samples are in the order of the rollout in every
parallel layout.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.algorithms.losses import kl_estimate, sample_mean_weights, sampled_reverse_kl, sums_per_sample
from slimrl.arguments.flags.algorithm import AlgorithmArguments
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.training.forward_step import TrainTensors
from slimrl.models.model_size import FORWARD_AND_BACKWARD, forward_flops
from slimrl.models.model_spec import ModelSpec
from slimrl.processes.files import OptionalFiles, atomic_file

CORRECT_REWARD = 1.0


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


FORMAT = "slimrl-train-data-1"
_COLUMNS = ("loss_mask", "train_log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs", "advantages")


def save_train_data(
    template: str,
    rollout_id: int,
    batch: RolloutBatch,
    columns: TrainTensors,
    parallel: ParallelState,
    *,
    with_policy: bool,
) -> None:
    """Writes `template` (--save-debug-train-data) with `{rollout_id}` filled in; one rank writes.

    Collective over all ranks.
    `{"format", "rollout_id", "samples"}`; a sample has `sample_id`, `group_id`, `tokens` (int64), `response_length`,
    `reward` (normalised), `raw_reward`, `truncated`, where it was trained (`data_parallel_rank`, `optimizer_step`,
    `micro_batch`), and per response token (float32) `loss_mask`, `train_log_probs`, `rollout_log_probs`,
    `ref_log_probs` and `teacher_log_probs` (None without such a model) and `advantages`. For losses without policy
    log-probabilities (SFT, pairs), `train_log_probs`, `rollout_log_probs` and `advantages` are None. An existing file
    is replaced. A full disk causes a warning.
    """
    if not parallel.is_last_stage or parallel.tp_rank or parallel.cp_rank:
        return
    own = _samples(batch, columns, parallel.dp_rank, with_policy=with_policy)
    gathered: list[Any] | None = [None] * parallel.dp_size if parallel.dp_rank == 0 else None
    dist.gather_object(own, gathered, group=parallel.dp_group, group_dst=0)
    if gathered is None:
        return
    samples = sorted((sample for part in gathered for sample in part), key=lambda sample: sample["sample_id"])
    path = Path(template.replace("{rollout_id}", str(rollout_id)))
    content = io.BytesIO()  # torch.save into a file hides a full disk behind another error
    torch.save({"format": FORMAT, "rollout_id": rollout_id, "samples": samples}, content)
    OptionalFiles(f"the dump {path}").attempt(lambda: _put(path, content.getbuffer()))


def _put(path: Path, content: memoryview) -> None:
    """Writes the file atomically."""
    with atomic_file(path) as unfinished:
        unfinished.write_bytes(content)


def _samples(batch: RolloutBatch, columns: TrainTensors, rank: int, *, with_policy: bool) -> list[dict[str, Any]]:
    places = {
        row: {"data_parallel_rank": rank, "optimizer_step": step, "micro_batch": number}
        for step, micro_batches in enumerate(batch.micro_batches)
        for number, rows in enumerate(micro_batches)
        for row in rows
    }
    lengths = batch.response_lengths.tolist()
    tokens = batch.tokens.split(batch.total_lengths.tolist())
    known = _COLUMNS if with_policy else ("loss_mask", "ref_log_probs")  # the others are 0 and unused
    split = {name: _parts(getattr(columns, name) if name in known else None, lengths) for name in _COLUMNS}
    return [
        {
            "sample_id": int(batch.sample_ids[row]),
            "group_id": int(batch.group_ids[row]),
            "tokens": tokens[row].clone(),
            "response_length": lengths[row],
            "reward": float(batch.rewards[row]),
            "raw_reward": float(batch.raw_rewards[row]),
            "truncated": bool(batch.truncated[row]),
            **places[row],
            **{name: parts[row] for name, parts in split.items()},
        }
        for row in range(len(batch))
    ]


def _parts(column: Tensor | None, lengths: list[int]) -> list[Tensor | None]:
    """Copies, one per sample: torch.save would write the whole storage of a slice."""
    if column is None:
        return [None] * len(lengths)
    return [part.clone() for part in column.detach().cpu().split(lengths)]
