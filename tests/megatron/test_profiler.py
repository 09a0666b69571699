"""torch's profiler in training: its files and their content; the memory snapshot without a GPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slimrl.arguments import Arguments
from slimrl.megatron.training.profiling import ACTOR, LOG_PROBS, MemoryHistory, PartProfiler
from tests.megatron import ranks, tiny


def train_twice(rank: int, world_size: int, init_method: str, args: Arguments, rollout: Any) -> None:
    trainer = ranks.start(rank, world_size, init_method, args)
    for rollout_id in range(2):
        trainer.train(rollout_id, ranks.share_of(trainer, rollout))
    trainer.close()


def names_in(path: Path) -> list[str]:
    return [event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]


@pytest.mark.slow
def test_selected_phases_of_the_selected_rollout_are_profiled(models: Any, one_rank: Any, tmp_path):
    args = tiny.tiny_args(
        load=str(models.policy),
        run_dir=str(tmp_path),
        use_pytorch_profiler=True,
        profile_step_start=1,
        profile_step_end=2,
        profile_target=[ACTOR, LOG_PROBS],
        **models.flags,
    )
    one_rank.run(train_twice, args, tiny.recorded_rollout(seed=5))
    files = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert files == [f"rank0-rollout1-{part}.json.gz" for part in (ACTOR, LOG_PROBS)]
    actor, log_probs = (names_in(tmp_path / "profile" / name) for name in files)
    assert sum(name.startswith("Optimizer.step#") for name in actor) == args.num_steps_per_rollout == 2
    assert any("Backward" in name for name in actor) and "aten::mm" in actor
    assert "aten::mm" in log_probs
    assert not any("Backward" in name or name.startswith("Optimizer.step#") for name in log_probs)


def test_unselected_ranks_and_rollouts_are_not_profiled(tmp_path):
    args = Arguments(run_dir=str(tmp_path), use_pytorch_profiler=True, profile_ranks=[1], profile_target=[ACTOR])
    for rank, rollout in ((0, 10), (1, 9), (1, 12)):
        with PartProfiler(args, rank, args.run_dir).part(ACTOR, rollout):
            torch.ones(2).sum()
    assert list(tmp_path.iterdir()) == []
    with PartProfiler(args, 1, args.run_dir).part(ACTOR, 11):
        torch.ones(2).sum()
    assert "aten::sum" in names_in(tmp_path / "profile" / "rank1-rollout11-train_actor.json.gz")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_memory_snapshot_is_rejected_without_a_gpu(tmp_path):
    args = Arguments(record_memory_history=True, memory_snapshot_dir=str(tmp_path))
    with pytest.raises(ValueError, match="records what is allocated on a GPU, and this machine has none"):
        MemoryHistory(args, 0)
