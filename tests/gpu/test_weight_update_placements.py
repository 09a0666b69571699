"""Weights from several trainer ranks into engines of several ranks: CUDA IPC where they share GPUs, NCCL else.

On the CPU tests/weights does the same through shared host memory and gloo. Here every tensor-parallel rank of an engine
opens the memory of the trainer rank on its own GPU, and trainer rank 0 alone joins the NCCL group of the engines while
the default group of all trainer ranks is NCCL too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import needs
from tests.gpu.test_weight_update import OPTIONS
from tests.megatron.tiny import save_qwen3
from tests.weights import placements
from tests.weights.placements import Placement

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs("sglang")]
# The server computes in bfloat16, transformers in float32 on the same weights: a unit of rounding is 2^-8 of a logit,
# which here is at most 4. Measured on a CPU: 0.006 in the mean, 0.024 at most.
LOG_PROB_LIMIT = 2**-3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of the same shape; the engines start with the first."""
    root = tmp_path_factory.mktemp("models")
    return [save_qwen3(root / str(seed), seed=seed) for seed in range(2)]


def placed(name: str, placement: Placement) -> object:
    return pytest.param(placement, marks=needs(gpus=placement.gpus), id=name)


@pytest.mark.parametrize(
    "placement",
    [
        placed("colocated, two trainer ranks, one engine of TP2", placements.ONE_ENGINE_COLOCATED),
        placed("colocated, four trainer ranks, two engines of TP2", placements.TWO_ENGINES_COLOCATED),
        placed("split, two trainer ranks, one engine", placements.ONE_ENGINE_SPLIT),
        placed("split, two trainer ranks, one engine of TP2", placements.TWO_RANK_ENGINE_SPLIT),
    ],
)
def test_every_engine_receives_and_serves_the_weights_of_all_ranks(
    placement: Placement, folders: list[Path], tmp_path: Path
):
    placements.check(
        placement,
        folders,
        tmp_path,
        options=OPTIONS,
        dtype=torch.bfloat16,
        limit=LOG_PROB_LIMIT,
        start_timeout_s=300,
    )
