"""Processes and checkpoints that the slow tests of this folder share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.megatron import ranks, tiny
from tests.megatron.launch import RankPool


@dataclasses.dataclass
class Models:
    """A policy and a reference model, each as a Hugging Face folder and as a torch_dist folder; their flags."""

    policy_hf: Path
    policy: Path
    reference_hf: Path
    reference: Path
    flags: dict[str, Any]


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    """A process for single-rank jobs."""
    with RankPool(1) as pool:
        yield pool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two processes."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """Four processes."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def eight_ranks() -> Iterator[RankPool]:
    """Eight processes."""
    with RankPool(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def models(one_rank: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Two dense layers."""
    return _convert(one_rank, tmp_path_factory.mktemp("models"), tiny.save_qwen3, {})


@pytest.fixture(scope="session")
def deep_models(one_rank: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Four dense layers: enough for uneven and for virtual pipeline stages."""
    save = functools.partial(tiny.save_qwen3, layers=4)
    return _convert(one_rank, tmp_path_factory.mktemp("deep_models"), save, {"num_layers": 4})


@pytest.fixture(scope="session")
def expert_models(one_rank: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Two layers of four experts."""
    return _convert(one_rank, tmp_path_factory.mktemp("expert_models"), tiny.save_qwen3_moe, tiny.MOE_FLAGS)


@pytest.fixture(scope="session")
def latent_models(one_rank: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Two layers with latent attention, one of them with experts whose bias stays."""
    flags = tiny.LATENT_FLAGS | {"moe_router_bias_update_rate": 0.0}
    return _convert(one_rank, tmp_path_factory.mktemp("latent_models"), tiny.save_deepseek, flags)


def _convert(pool: RankPool, root: Path, save: Callable[..., Path], flags: dict[str, Any]) -> Models:
    made = Models(
        policy_hf=save(root / "policy_hf", seed=1),
        policy=root / "policy",
        reference_hf=save(root / "reference_hf", seed=2),
        reference=root / "reference",
        flags=flags,
    )
    for source, target in ((made.policy_hf, made.policy), (made.reference_hf, made.reference)):
        pool.run(ranks.convert, tiny.tiny_args(**flags), source, target)
    return made
