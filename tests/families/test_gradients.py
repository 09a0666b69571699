"""GLM-4 and the families with experts and ordinary attention: every gradient matches transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.families import latent_jobs
from tests.families.conftest import Pools
from tests.families.latent_jobs import PassResult
from tests.families.test_latent_attention import flags_of, furthest, reference
from tests.families.toys import TOYS

pytestmark = pytest.mark.slow

TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
EXPERT = ("--expert-model-parallel-size", "2")
# the router and the shared expert's gate each receive a part of the tokens; so do norms after a block
LAYOUTS = {
    "tensor 2, sequence": (TENSOR, ("glm4", "qwen2-moe", "qwen3-moe", "glm4-moe")),
    "expert 2": (EXPERT, ("qwen2-moe", "qwen3-moe", "glm4-moe")),
}
CASES = [(name, layout) for layout, (_, names) in LAYOUTS.items() for name in names]


@pytest.fixture(scope="module")
def found(pools: Pools, folders: dict[str, Path]) -> dict[tuple[str, str], list[PassResult]]:
    """Results of each rank, by family and layout."""
    results: dict[tuple[str, str], list[PassResult]] = {}
    for layout, (flags, names) in LAYOUTS.items():
        by_rank = pools[2].run(
            latent_jobs.passes, {name: (flags_of(TOYS[name], *flags), folders[name]) for name in names}
        )
        results |= {(name, layout): [one[name] for one in by_rank] for name in names}
    return results


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, PassResult]:
    """transformers and autograd, one sequence at a time."""
    return {name: reference(TOYS[name], folders[name]) for name in sorted({name for name, _ in CASES})}


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_gradient_matches_transformers(name, layout, found, expected):
    wanted = expected[name].gradients
    for result in found[name, layout]:
        assert result.loss == pytest.approx(expected[name].loss, rel=1e-5)
        assert result.gradients.keys() == wanted.keys()
        padding = TOYS[name].config.get("pad_token_id")
        if padding is not None:  # transformers never trains its embedding
            assert not wanted["model.embed_tokens.weight"][padding].any()
            result.gradients["model.embed_tokens.weight"][padding] = 0.0
        far = {key: furthest(result.gradients[key], value) for key, value in wanted.items() if value.abs().max() > 0}
        worst = max(far, key=far.__getitem__)
        print(f"{name}, {layout}: largest relative difference {far[worst]:.1e} ({worst})")
        assert far[worst] < 1e-5, worst
