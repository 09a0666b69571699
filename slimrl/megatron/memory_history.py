"""Every allocation on a rank's GPU with the line that made it, as a snapshot for https://docs.pytorch.org/memory_viz.

Owns `<--memory-snapshot-dir>/rank<R>-<--memory-snapshot-path>`: written after `--memory-snapshot-num-steps` rollouts,
else when training ends, and at once where the GPU is out of memory. Used by the trainer; CUDA only.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

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
        torch._C._cuda_attach_out_of_memory_observer(lambda *_: self._write())

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
