"""Each family's Megatron model computes what transformers computes and gives its weights back bit for bit.

Every layout of every family runs in one job per number of ranks, since starting ranks costs more than the models do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.families import jobs
from tests.families.conftest import Pools
from tests.families.layouts import LAYOUTS, flags, of_folder
from tests.families.toys import TOYS

pytestmark = pytest.mark.slow

SEQUENCES = [[5, 17, 80, 3, 9, 41, 41, 2], [7], [100, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [60, 61, 62]]
TOLERANCE = 1e-5  # of the largest logit of a sequence; single precision leaves about 1e-6


CASES = [(layout.name, toy) for layout in LAYOUTS for toy in layout.toys]


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[Tensor]]:
    """transformers' logits of each sequence alone."""
    return {
        name: [toy.reference_logits(folders[name], torch.tensor([sequence]))[0] for sequence in SEQUENCES]
        for name, toy in TOYS.items()
    }


@pytest.fixture(scope="module")
def outcomes(pools: Pools, folders: dict[str, Path]) -> dict[tuple[str, str], list[jobs.Outcome]]:
    """Results of each rank, by layout and toy model."""
    found: dict[tuple[str, str], list[jobs.Outcome]] = {}
    for layout in LAYOUTS:
        cases = [
            jobs.Case(name, flags(TOYS[name], layout, *of_folder(folders[name])), folders[name]) for name in layout.toys
        ]
        by_rank = pools[layout.ranks].run(jobs.logits_and_export, cases, SEQUENCES)
        found |= {(layout.name, name): [one[name] for one in by_rank] for name in layout.toys}
    return found


@pytest.mark.parametrize(("layout", "toy"), [case for case in CASES if not case[0].startswith("pipeline")])
def test_logits_match_transformers(layout, toy, outcomes, expected):
    for outcome in outcomes[layout, toy]:
        differences = [
            float((ours - theirs).abs().max() / theirs.abs().max())
            for ours, theirs in zip(outcome.logits, expected[toy], strict=True)
        ]
        print(f"{toy}, {layout}: largest relative difference {max(differences):.1e}")
        assert max(differences) < TOLERANCE
    assert min(float(logits.abs().max()) for logits in expected[toy]) > 0.5  # the comparison is meaningful


@pytest.mark.parametrize(("layout", "toy"), CASES)
def test_every_rank_exports_every_tensor_once_unchanged(layout, toy, outcomes, folders):
    from slimrl.models.families import family_for
    from slimrl.models.model_spec import ModelSpec
    from slimrl.weights.hf_checkpoint import HfCheckpoint, read_hf_config

    config = read_hf_config(folders[toy])
    family = family_for(config)
    with HfCheckpoint(folders[toy]) as checkpoint:
        stored = {name for name in checkpoint.names if not name.startswith(family.carried_prefixes(config))}
    for outcome in outcomes[layout, toy]:
        assert outcome.different == []
        assert outcome.names == family.hf_names(ModelSpec.from_hf_config(config))
        assert set(outcome.names) == stored and len(outcome.names) == len(stored)
