"""torch's profiler around parts of training, on the ranks and in the rollouts that the flags name.

Owns `<run folder>/profile/rank<R>-rollout<N>-<part>.json.gz`, one file for each profiled part: Chrome trace events, for
https://ui.perfetto.dev. Promises that nothing is profiled, and nothing costs anything, elsewhere. Used by the trainer.
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
