"""Checkpoints on GPUs: behaviour that host memory and a machine without Transformer Engine cannot show."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slimrl.arguments import Arguments
from tests.end_to_end import checkpoints
from tests.gpu.conftest import needs
from tests.megatron import layouts, ranks, tiny
from tests.megatron.launch import run_ranks

pytestmark = [pytest.mark.slow, needs()]


def save_beside_training(rank: int, world_size: int, init_method: str, args: Arguments, root: Path) -> bool:
    """Saves one state synchronously and asynchronously, the latter delayed while the device overwrites everything."""
    from slimrl.megatron.checkpoint import io
    from slimrl.megatron.checkpoint import state as checkpoint
    from slimrl.megatron.checkpoint.saver import CheckpointSaver

    trainer: Any = ranks.start(rank, world_size, init_method, args)
    trainer.train(0, ranks.share_of(trainer, tiny.recorded_rollout(0)))
    trainer.save(0, {}, root / "in_the_way")
    released, write = threading.Event(), io.write

    def held_back(*arguments: Any) -> None:
        assert released.wait(120)
        write(*arguments)

    io.write = held_back
    saver = CheckpointSaver(background=True, retention=trainer._saver._retention, timeout=trainer._saver._timeout)
    state = trainer._training_state
    saver.save(root / "behind", 0, lambda: checkpoint.take_snapshot(state, 0, {}, with_optimizer=True))
    saver.release()
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


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=needs(gpus=2))])
def test_device_state_is_copied_before_training_continues(size: int, tmp_path: Path):
    folder = tiny.save_qwen3(tmp_path / "hf", seed=1)
    args = tiny.tiny_args(
        ref_load=str(folder), hf_checkpoint=str(folder), use_distributed_optimizer=True, bf16=True, num_rollout=3
    )
    assert all(run_ranks(save_beside_training, size, args, tmp_path))
    folders = (tmp_path / "in_the_way" / "iter_0000000", tmp_path / "behind" / "iter_0000000")
    assert checkpoints.differences(*map(checkpoints.read, folders)) == []


def resumed_on(rank: int, world_size: int, init_method: str, args: Arguments) -> list[dict[str, float]]:
    """The steps of two rollouts starting from --load; saved after the first."""
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


def test_resumed_device_step_matches_the_uninterrupted_one(tmp_path: Path):
    folder = tiny.save_qwen3(tmp_path / "hf", seed=1)
    save = str(tmp_path / "save")
    args = tiny.tiny_args(ref_load=str(folder), hf_checkpoint=str(folder), load=save, save=save, bf16=True)
    whole = run_ranks(resumed_on, 1, args)[0]
    assert run_ranks(resumed_on, 1, args)[0] == whole


# -- with and without Transformer Engine, whose norms and matrix products add state to a checkpoint --------------------

LOCAL = {"transformer_impl": "local"}
ENGINE = {"transformer_impl": "transformer_engine"}
GROUPED = ENGINE | {"moe_grouped_gemm": True}  # all experts' weights in one module
WRITER_AND_READER = [
    pytest.param(LOCAL, ENGINE, id="written without, read with Transformer Engine"),
    pytest.param(LOCAL, GROUPED, id="written without, read with grouped experts"),
    pytest.param(ENGINE, LOCAL, id="written with, read without Transformer Engine"),
]


def trained_and_saved(rank: int, world_size: int, init_method: str, args: Arguments) -> dict[str, dict[str, Tensor]]:
    """The weights and their fp32 copies in the checkpoint of rollout 0, by Hugging Face name."""
    trainer: Any = ranks.start(rank, world_size, init_method, args)
    trainer.train(0, ranks.share_of(trainer, tiny.recorded_rollout(0)))
    trainer.save(0, {})
    state = {name: ranks.export(trainer, name) for name in ("data", "main_param")}
    trainer.close()
    return state


def resumed_and_trained(
    rank: int, world_size: int, init_method: str, args: Arguments
) -> tuple[int, dict[str, dict[str, Tensor]], list[dict[str, float]]]:
    """(first rollout, its state as in `trained_and_saved`, the steps of this rollout) of a run that --load resumes."""
    trainer: Any = ranks.start(rank, world_size, init_method, args)
    first = trainer.start_rollout_id
    state = {name: ranks.export(trainer, name) for name in ("data", "main_param")}
    steps = trainer.train(first, ranks.share_of(trainer, tiny.recorded_rollout(first)))
    trainer.close()
    return first, state, steps


def resume_in_another_implementation(kind: str, writer: dict[str, Any], reader: dict[str, Any], root: Path) -> None:
    """`reader` loads what `writer` trained and saved bit for bit, and its next step equals that of `writer`."""
    folder = layouts.save(kind, root / "hf", seed=1, layers=2)
    common = layouts.model_flags(kind, 2) | {"bf16": True, "ref_load": str(folder), "hf_checkpoint": str(folder)}
    common |= {"load": str(root / "saved"), "save": str(root / "saved"), "num_rollout": 2}
    (saved,) = run_ranks(trained_and_saved, 1, tiny.tiny_args(**common, **writer))
    outcomes = [run_ranks(resumed_and_trained, 1, tiny.tiny_args(**common, **flags))[0] for flags in (writer, reader)]
    for first, state, _ in outcomes:
        assert first == 1
        for part, tensors in saved.items():
            assert tensors.keys() == state[part].keys()
            assert [name for name in tensors if not torch.equal(tensors[name], state[part][name])] == []
    expected, actual = (steps for *_, steps in outcomes)
    for one, other in zip(expected, actual, strict=True):
        for name in ("loss", "grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=2**-5, abs=2**-7)  # bfloat16, as in layouts.within_bf16


@needs("transformer_engine")
@pytest.mark.parametrize("kind", layouts.ALL)
@pytest.mark.parametrize(("writer", "reader"), WRITER_AND_READER)
def test_run_resumes_with_the_other_layer_implementation(
    writer: dict[str, Any], reader: dict[str, Any], kind: str, tmp_path: Path
):
    resume_in_another_implementation(kind, writer, reader, tmp_path)


def loaded(rank: int, world_size: int, init_method: str, args: Arguments) -> dict[str, Tensor]:
    """The weights that a trainer starts with, by Hugging Face name."""
    trainer: Any = ranks.start(rank, world_size, init_method, args)
    weights = ranks.export(trainer)
    trainer.close()
    return weights


def convert_and_load(kind: str, writer: dict[str, Any], reader: dict[str, Any], root: Path) -> None:
    """A Hugging Face folder converted to torch_dist by `writer` is loaded by `reader` bit for bit."""
    folder = layouts.save(kind, root / "hf", seed=1, layers=2)
    flags = layouts.model_flags(kind, 2)
    run_ranks(ranks.convert, 1, tiny.tiny_args(**flags, **writer), folder, root / "converted")
    weights = [
        run_ranks(loaded, 1, tiny.tiny_args(**flags, **more, ref_load=str(source), hf_checkpoint=str(folder)))[0]
        for source, more in ((folder, LOCAL), (root / "converted", reader))
    ]
    assert weights[0].keys() == weights[1].keys()
    assert [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])] == []


@needs("transformer_engine")
@pytest.mark.parametrize("kind", layouts.ALL)
@pytest.mark.parametrize(("writer", "reader"), WRITER_AND_READER)
def test_converted_model_loads_with_the_other_layer_implementation(
    writer: dict[str, Any], reader: dict[str, Any], kind: str, tmp_path: Path
):
    convert_and_load(kind, writer, reader, tmp_path)
