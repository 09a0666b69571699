"""A rollout trained on through latent attention and experts leaves the same weights in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slimrl.arguments import Arguments, read_args
from tests.families import conversion_jobs, training_jobs
from tests.families.conftest import Pools
from tests.families.conversion_jobs import Journey
from tests.families.toys import TOYS
from tests.megatron import tiny

pytestmark = pytest.mark.slow

TOY = TOYS["deepseek-v3"]
BIAS_STEP = 1e-3
TRAINING = {
    "num_rollout": 2,
    "num_steps_per_rollout": 2,
    "micro_batch_size": 2,
    "lr": 2e-3,
    "lr_decay_style": "constant",
    "adam_eps": 1e-6,  # far above rounding: a gradient that is all noise must not become a full step
    "eps_clip": 0.02,
    "eps_clip_high": 0.03,
    "moe_router_bias_update_rate": BIAS_STEP,
}
TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
EXPERT = ("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1")
LAYOUTS = {
    "tensor and expert ranks": (*TENSOR, *EXPERT),
    "expert ranks": EXPERT,
    "context ranks": ("--context-parallel-size", "2"),
    "pipeline stages": ("--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "1"),
}


@pytest.fixture(scope="module")
def journey(pools: Pools, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Journey:
    root = tmp_path_factory.mktemp("training")
    made = Journey(TOY.flags, folders[TOY.name], root / "torch_dist", root / "back")
    pools[1].run(conversion_jobs.there_and_back, [made])
    return made


def flags(journey: Journey, *layout: str) -> Arguments:
    args, _ = read_args([*TOY.flags, *layout], entry="convert_hf_to_torch_dist.py")
    for name, value in TRAINING.items():
        setattr(args, name, value)
    args.load = args.ref_load = str(journey.torch_dist)
    return args


@pytest.fixture(scope="module")
def rollout() -> Any:
    return tiny.recorded_rollout(seed=5)


@pytest.fixture(scope="module")
def alone(pools: Pools, journey: Journey, rollout: Any) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """What one rank makes of the rollout; its gradients are compared with transformers' elsewhere."""
    return pools[1].run(training_jobs.train, flags(journey), journey.hf, rollout)[0]


@pytest.fixture(scope="module")
def together(
    pools: Pools, journey: Journey, rollout: Any
) -> dict[str, tuple[list[dict[str, float]], dict[str, Tensor]]]:
    return {
        name: pools[2].run(training_jobs.train, flags(journey, *layout), journey.hf, rollout)[0]
        for name, layout in LAYOUTS.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_end_where_one_does(layout: str, alone: Any, together: Any):
    (metrics, weights), (expected_metrics, expected) = together[layout], alone
    for key in ("loss", "grad_norm"):
        assert [step[key] for step in metrics] == pytest.approx([step[key] for step in expected_metrics], rel=1e-5)
    assert weights.keys() == expected.keys()
    wrong = sum(float((weights[name] - value).double().square().sum()) for name, value in expected.items())
    assert (wrong / sum(float(value.double().square().sum()) for value in expected.values())) ** 0.5 < 1e-6


def test_the_routers_bias_moves_by_its_rate_at_each_step_against_the_load(alone: Any, journey: Journey):
    from slimrl.weights.hf_files import HfCheckpoint

    weights = alone[1]
    for layer in (1, 2):
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        with HfCheckpoint(Path(journey.hf)) as checkpoint:
            moved = (weights[name] - checkpoint.tensor(name)) / BIAS_STEP
        assert torch.equal(moved.round(), moved.clamp(-2, 2).round()) and moved.abs().max() > 1.9
        torch.testing.assert_close(moved, moved.round(), rtol=0, atol=1e-3)
        assert (moved > 1).any() and (moved < -1).any()
