"""What a training rank writes for debugging, if enabled by flags: memory snapshots, profiler traces, training data.

`--record-memory-history` (CUDA only) records every allocation with its stack in
`<--memory-snapshot-dir>/rank<R>-<--memory-snapshot-path>`, for https://docs.pytorch.org/memory_viz. The file is written
after `--memory-snapshot-num-steps` rollouts or else when training ends, and when the GPU runs out of memory.

`--use-pytorch-profiler` writes one Chrome trace per profiled part,
`<run-dir>/profile/rank<R>-rollout<N>-<part>.json.gz`, for https://ui.perfetto.dev. Other ranks and rollouts have no
overhead.

`--save-debug-train-data` writes every sample with the columns that the loss reads besides the model, before the first
optimizer step; `torch.load(path, weights_only=True)` reads it. The samples are in the order of the rollout in every
parallel layout.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from slimrl.arguments.flags.logging import ProfilingArguments
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.training.forward_step import TrainTensors
from slimrl.processes.files import OptionalFiles, atomic_file

logger = logging.getLogger(__name__)

_ENTRIES = 1_000_000


class MemoryHistory:
    """Records with `--record-memory-history`. Call `trained` after each rollout, `close` at the end."""

    def __init__(self, profiling: ProfilingArguments, rank: int) -> None:
        """Raises ValueError if there is no GPU."""
        self._records = profiling.record_memory_history
        self._rollouts_left = profiling.memory_snapshot_num_steps
        self._path = Path(profiling.memory_snapshot_dir) / f"rank{rank}-{profiling.memory_snapshot_path}"
        if not self._records:
            return
        if not torch.cuda.is_available():
            raise ValueError(
                "--record-memory-history records what is allocated on a GPU, and this machine has none: leave it out"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)
        torch._C._cuda_attach_out_of_memory_observer(lambda *_: self._write())  # type: ignore[attr-defined]

    def trained(self) -> None:
        """Counts one more trained rollout."""
        if self._records and self._rollouts_left is not None:
            self._rollouts_left -= 1
            if self._rollouts_left == 0:
                self.close()

    def close(self) -> None:
        """Writes the snapshot unless it is already written, and stops recording."""
        if self._records:
            self._records = False
            self._write()
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self) -> None:
        torch.cuda.memory._dump_snapshot(str(self._path))
        logger.info("wrote the GPU memory snapshot to %s", self._path)


OVERALL, ACTOR, LOG_PROBS = "train_overall", "train_actor", "train_log_probs"


class PartProfiler:
    """`with profiler.part(ACTOR, rollout_id): ...` profiles the block if `--profile-*` select it."""

    def __init__(self, profiling: ProfilingArguments, rank: int, run_dir: str) -> None:
        chosen = profiling.use_pytorch_profiler and rank in profiling.profile_ranks
        self._targets = frozenset(profiling.profile_target) if chosen else frozenset()
        self._rollouts = range(profiling.profile_step_start, profiling.profile_step_end)
        self._rank = rank
        self._folder = Path(run_dir) / "profile"

    @contextlib.contextmanager
    def part(self, target: str, rollout_id: int) -> Iterator[None]:
        """Profiles the block and writes its file at the end. A block that fails writes none."""
        if target not in self._targets or rollout_id not in self._rollouts:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, record_shapes=True, profile_memory=True, with_flops=True) as profiler:
            yield
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank{self._rank}-rollout{rollout_id}-{target}.json.gz"
        profiler.export_chrome_trace(str(path))
        logger.info("profiled %s of rollout %d: %s", target, rollout_id, path)


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
