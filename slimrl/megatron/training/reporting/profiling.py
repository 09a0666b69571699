"""GPU memory snapshots and torch profiler traces of a training rank, if enabled by flags.

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

from slimrl.arguments.flags.logging import ProfilingArguments

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
