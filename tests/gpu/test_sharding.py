"""Sharded and offloaded training state on GPUs: NCCL, streams, pinned memory, freed bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slimrl.arguments import Arguments
from slimrl.data.train_batch import RolloutBatch
from tests.gpu.conftest import needs
from tests.megatron import ranks, test_freeze, tiny
from tests.megatron.launch import RankPool
from tests.megatron.layouts import fsdp
from tests.megatron.test_master_weights import HALF, ON_HOST
from tests.megatron.test_sharding import ROLLOUTS, SPREAD, ZERO3, losses_and_norms, relative_error, train

pytestmark = [pytest.mark.slow, needs()]


@pytest.fixture
def model(tmp_path: Path) -> dict[str, Any]:
    folder = str(tiny.save_qwen3(tmp_path / "model", seed=1))
    return {"load": folder, "ref_load": folder, "use_kl_loss": True, "kl_loss_coef": 0.05}


@needs(gpus=2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_megatron_fsdp_over_nccl_matches_the_distributed_optimizer(strategy: str, model: dict[str, Any]):
    with RankPool(2) as pool:
        spread = pool.run(train, tiny.tiny_args(**model, **SPREAD), ROLLOUTS, 2)[0]
        shared = pool.run(train, tiny.tiny_args(**model, **fsdp(strategy)), ROLLOUTS, 2)[0]
    assert losses_and_norms(shared) == pytest.approx(losses_and_norms(spread), rel=1e-4)
    assert relative_error(shared.weights, spread.weights) < 1e-4


@needs(gpus=2)
def test_megatron_fsdp_resumes_on_gpus(model: dict[str, Any], tmp_path: Path):
    args = tiny.tiny_args(**model, **ZERO3, bf16=True)
    with RankPool(2) as pool:
        whole = pool.run(train, args, ROLLOUTS, 2)[0]
        args.save = str(tmp_path / "saved")
        pool.run(train, args, ROLLOUTS, 1)
        args.load = args.save
        resumed = pool.run(train, args, ROLLOUTS, 2)[0]
    assert losses_and_norms(resumed) == pytest.approx(losses_and_norms(whole)[4:], rel=1e-3)
    assert relative_error(resumed.weights, whole.weights) < 1e-3


def places_of_state(rank: int, size: int, init_method: str, args: Arguments, rollout: RolloutBatch) -> dict[str, int]:
    """Elements of the optimizer's float32 copies and moments after a step, by device."""
    trainer = ranks.start(rank, size, init_method, args)
    trainer.train(0, ranks.share_of(trainer, rollout))
    found = {"cpu": 0, "cuda": 0}
    for part in trainer.optimizer.chained_optimizers:
        for inner in part.optimizer.sub_optimizers:
            tensors = [parameter for group in inner.param_groups for parameter in group["params"]]
            tensors += [value for state in inner.state.values() for name, value in state.items() if "exp_avg" in name]
            for tensor in tensors:
                found[tensor.device.type] += tensor.numel()
    trainer.close()
    return found


def test_offloaded_state_is_in_host_memory_and_trains_the_same(model: dict[str, Any], tmp_path: Path):
    with RankPool(1) as pool:
        device = pool.run(train, tiny.tiny_args(**model, **SPREAD, bf16=True), ROLLOUTS, 2)[0]
        for more, on_host in ((ON_HOST, 1.0), (ON_HOST | HALF, 0.5)):
            args = tiny.tiny_args(**model, **more, bf16=True)
            places = pool.run(places_of_state, args, ROLLOUTS[0])[0]
            assert places["cpu"] / sum(places.values()) == pytest.approx(on_host, abs=0.2)
            host = pool.run(train, args, ROLLOUTS, 2)[0]
            assert losses_and_norms(host) == pytest.approx(losses_and_norms(device), rel=0.02)
            assert relative_error(host.weights, device.weights) < 0.01
            args.save = str(tmp_path / str(on_host))
            pool.run(train, args, ROLLOUTS, 1)
            args.load = args.save
            resumed = pool.run(train, args, ROLLOUTS, 2)[0]
            assert relative_error(resumed.weights, host.weights) < 1e-3


def test_frozen_weights_are_unchanged_without_gradients_on_a_gpu(model: dict[str, Any]):
    args = tiny.tiny_args(**model, only_train_params_name_list=["mlp.linear_fc1"])
    with RankPool(1) as pool:
        outcome = pool.run(test_freeze.train, args, ROLLOUTS[0])[0]
    assert outcome.gradients == outcome.moments == 2 * 2 * 128 * 64
    assert all(torch.isfinite(value).all() for value in outcome.weights.values())
