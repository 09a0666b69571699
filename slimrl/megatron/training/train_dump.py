"""What a rollout was trained on, in one file: every sample with the columns that the loss reads beside the model.

`--save-debug-train-data` writes it before the first optimizer step; `torch.load(path, weights_only=True)` reads it.
The samples are in the order of the rollout, whatever the layout of training. Called by the trainer.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.training.forward_step import TrainTensors
from slimrl.processes.atomic_file import atomic_file
from slimrl.processes.best_effort_files import OptionalFiles

FORMAT = "slimrl-train-data-1"
_COLUMNS = ("loss_mask", "train_log_probs", "rollout_log_probs", "ref_log_probs", "advantages")


def save_train_data(
    args: Arguments, rollout_id: int, batch: RolloutBatch, columns: TrainTensors, parallel: ParallelState
) -> None:
    """Writes --save-debug-train-data with `{rollout_id}` filled in; collective over all ranks, of which one writes.

    `{"format", "rollout_id", "samples"}`; a sample has `sample_id`, `group_id`, `tokens` (int64), `response_length`,
    `reward` (normalised), `raw_reward`, `truncated`, where it was trained (`data_parallel_rank`, `optimizer_step`,
    `micro_batch`), and per response token (float32) `loss_mask`, `train_log_probs`, `rollout_log_probs`,
    `ref_log_probs` (None without a reference) and `advantages`. Where the loss reads no policy's log-probabilities
    (SFT), all but the mask are None. A file of that name is replaced. Where the disk has no room, a warning says so.
    """
    if not parallel.is_last_stage or parallel.tp_rank or parallel.cp_rank:
        return
    own = _samples(batch, columns, parallel.dp_rank, with_policy=args.compute_advantages_and_returns)
    gathered: list[Any] | None = [None] * parallel.dp_size if parallel.dp_rank == 0 else None
    dist.gather_object(own, gathered, group=parallel.dp_group, group_dst=0)
    if gathered is None:
        return
    samples = sorted((sample for part in gathered for sample in part), key=lambda sample: sample["sample_id"])
    path = Path(args.save_debug_train_data.replace("{rollout_id}", str(rollout_id)))
    content = io.BytesIO()  # torch.save into a file tells of a full disk by an error of its own
    torch.save({"format": FORMAT, "rollout_id": rollout_id, "samples": samples}, content)
    OptionalFiles(f"the dump {path}").attempt(lambda: _put(path, content.getbuffer()))


def _put(path: Path, content: memoryview) -> None:
    """The file appears whole or not at all."""
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
    known = _COLUMNS if with_policy else ("loss_mask",)  # the others are 0 because nothing reads them
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
    """Copies, one per sample: a part of a tensor would be written with the whole of it."""
    if column is None:
        return [None] * len(lengths)
    return [part.clone() for part in column.detach().cpu().split(lengths)]
