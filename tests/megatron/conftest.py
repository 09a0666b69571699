"""Processes and checkpoints that the slow tests of this room share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.megatron import ranks, tiny
from tests.megatron.launch import RankPool


@dataclasses.dataclass
class Models:
    """A policy and a reference model, each as a Hugging Face folder and as a torch_dist folder."""

    policy_hf: Path
    policy: Path
    reference_hf: Path
    reference: Path
    untied_hf: Path


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
def models(one_rank: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The models, converted."""
    root = tmp_path_factory.mktemp("models")
    made = Models(
        policy_hf=tiny.save_qwen3(root / "policy_hf", seed=1),
        policy=root / "policy",
        reference_hf=tiny.save_qwen3(root / "reference_hf", seed=2),
        reference=root / "reference",
        untied_hf=tiny.save_qwen3(root / "untied_hf", seed=3, tied=False),
    )
    for source, target in ((made.policy_hf, made.policy), (made.reference_hf, made.reference)):
        one_rank.run(ranks.convert, tiny.tiny_args(), source, target)
    return made
