"""Dump of a rollout's training data: every sample with the columns that the loss reads besides the model.

`--save-debug-train-data` writes it before the first optimizer step; `torch.load(path, weights_only=True)` reads it.
The samples are in the order of the rollout in every parallel layout. Called by the trainer.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.training.forward_step import TrainTensors
from slimrl.processes.atomic_file import atomic_file
from slimrl.processes.best_effort_files import OptionalFiles

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
