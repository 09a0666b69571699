"""GPU memory snapshots and torch profiler traces of a training rank, where the flags ask for them.

`--record-memory-history` (CUDA only) records every allocation with its stack in
`<--memory-snapshot-dir>/rank<R>-<--memory-snapshot-path>`, for https://docs.pytorch.org/memory_viz. The file is written
after `--memory-snapshot-num-steps` rollouts or else when training ends, and when the GPU runs out of memory.

`--use-pytorch-profiler` writes one Chrome trace per profiled part,
`<run-dir>/profile/rank<R>-rollout<N>-<part>.json.gz`, for https://ui.perfetto.dev. Other ranks and rollouts have no
overhead.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from slimrl.arguments import Arguments

logger = logging.getLogger(__name__)

_ENTRIES = 1_000_000


class MemoryHistory:
    """Records where `--record-memory-history` asks for it. Call `trained` after each rollout, `close` at the end."""

    def __init__(self, args: Arguments, rank: int) -> None:
        """Raises ValueError where there is no GPU whose memory could be recorded."""
        self._records = args.record_memory_history
        self._rollouts_left = args.memory_snapshot_num_steps
        self._path = Path(args.memory_snapshot_dir) / f"rank{rank}-{args.memory_snapshot_path}"
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
        """One more rollout was trained on."""
        if self._records and self._rollouts_left is not None:
            self._rollouts_left -= 1
            if self._rollouts_left == 0:
                self.close()

    def close(self) -> None:
        """Writes the snapshot, unless that was done, and stops recording."""
        if self._records:
            self._records = False
            self._write()
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self) -> None:
        torch.cuda.memory._dump_snapshot(str(self._path))
        logger.info("wrote the record of GPU memory to %s", self._path)


OVERALL, ACTOR, LOG_PROBS = "train_overall", "train_actor", "train_log_probs"


class PartProfiler:
    """`with profiler.part(ACTOR, rollout_id): ...`: profiles the block where `--profile-*` ask for it."""

    def __init__(self, args: Arguments, rank: int) -> None:
        chosen = args.use_pytorch_profiler and rank in args.profile_ranks
        self._targets = frozenset(args.profile_target) if chosen else frozenset()
        self._rollouts = range(args.profile_step_start, args.profile_step_end)
        self._rank = rank
        self._folder = Path(args.run_dir) / "profile"

    @contextlib.contextmanager
    def part(self, target: str, rollout_id: int) -> Iterator[None]:
        """Profiles the block; its file is there when this returns. A block that fails leaves none."""
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
