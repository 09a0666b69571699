"""Checkpoints on GPUs: what host memory cannot show. Run on a machine with one GPU or more."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from slimrl.arguments import Arguments
from tests.end_to_end import checkpoints
from tests.megatron import ranks, tiny
from tests.megatron.launch import run_ranks


def save_beside_training(rank: int, world_size: int, init_method: str, args: Arguments, root: Path) -> bool:
    """One state saved in the way and in the background, there held back while the device overwrites everything."""
    from slimrl.megatron import checkpoint, checkpoint_io
    from slimrl.megatron.checkpoint_saver import CheckpointSaver

    trainer: Any = ranks.start(rank, world_size, init_method, args)
    trainer.train(0, ranks.share_of(trainer, tiny.recorded_rollout(0)))
    trainer.save(0, {}, root / "in_the_way")
    released, write = threading.Event(), checkpoint_io.write

    def held_back(*arguments: Any) -> None:
        assert released.wait(120)
        write(*arguments)

    checkpoint_io.write = held_back
    saver = CheckpointSaver(background=True, retention=trainer._saver._retention, timeout=trainer._saver._timeout)
    state = trainer._training_state()
    saver.save(root / "behind", 0, lambda: checkpoint.take_snapshot(state, 0, {}, with_optimizer=True, copy=True))
    with torch.no_grad():
        for stage in trainer.stages:
            for parameter in stage.parameters():
                parameter.zero_()
    trainer.train(1, ranks.share_of(trainer, tiny.recorded_rollout(1)))
    torch.cuda.synchronize()
    released.set()
    saver.close()
    on_device = all(parameter.is_cuda for stage in trainer.stages for parameter in stage.parameters())
    trainer.close()
    return on_device


def test_a_state_on_the_device_is_copied_before_training_goes_on(gpus: int, tmp_path: Path):
    folder = tiny.save_qwen3(tmp_path / "hf", seed=1)
    for size in sorted({1, min(gpus, 2)}):
        root = tmp_path / str(size)
        args = tiny.tiny_args(
            ref_load=str(folder), hf_checkpoint=str(folder), use_distributed_optimizer=True, bf16=True, num_rollout=3
        )
        assert all(run_ranks(save_beside_training, size, args, root))
        folders = (root / "in_the_way" / "iter_0000000", root / "behind" / "iter_0000000")
        assert checkpoints.differences(*map(checkpoints.read, folders)) == []


def resumed_on(rank: int, world_size: int, init_method: str, args: Arguments) -> list[dict[str, float]]:
    """The steps of two rollouts from where --load stands; saved after the first."""
    trainer: Any = ranks.start(rank, world_size, init_method, args)
    first = trainer.start_rollout_id
    metrics = []
    for rollout_id in range(first, 2):
        steps = trainer.train(rollout_id, ranks.share_of(trainer, tiny.recorded_rollout(rollout_id)))
        metrics = [{name: step[name] for name in step if "memory" not in name} for step in steps]
        if rollout_id == 0:
            trainer.save(0, {})
    trainer.close()
    return metrics


def test_a_resumed_step_on_the_device_is_the_uninterrupted_one(tmp_path: Path):
    folder = tiny.save_qwen3(tmp_path / "hf", seed=1)
    save = str(tmp_path / "save")
    args = tiny.tiny_args(ref_load=str(folder), hf_checkpoint=str(folder), load=save, save=save, bf16=True)
    whole = run_ranks(resumed_on, 1, args)[0]
    assert run_ranks(resumed_on, 1, args)[0] == whole
