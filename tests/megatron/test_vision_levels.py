"""Qwen3-VL trains as transformers and plain autograd in float64: alternating positions, features added to layers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from slimrl.data.images.batch import mrope_positions
from slimrl.models.families.vision import VisionTokens
from tests.megatron import reference, vision
from tests.megatron.layouts import CP2, DYNAMIC, OVERLAP, PP2, SETTINGS, SPREAD, TP2, TP2_SP, Layout
from tests.megatron.test_vision import FROZEN, args_of, trained_like

VALUES = 3 * 2 * 16 * 16
LAYOUTS = {
    "1 rank, packed": Layout(1, DYNAMIC | {"max_tokens_per_gpu": 80}),
    "1 rank, the tower frozen": Layout(1, FROZEN),
    "DP2, distributed optimizer, overlapped": Layout(2, OVERLAP),
    "TP2": Layout(2, TP2),
    "TP2 SP": Layout(2, TP2_SP),
    "PP2": Layout(2, PP2),
    "CP2": Layout(2, CP2 | SPREAD),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("levels")
    return vision.save_qwen3_vl(root / "policy", seed=1), vision.save_qwen3_vl(root / "reference", seed=2)


@pytest.fixture(scope="module")
def batch() -> Any:
    return vision.without_sampled_image(vision.rollout(seed=5, values=VALUES))


@pytest.fixture(scope="module")
def truths(folders: tuple[Path, Path], batch: Any) -> dict[str | None, reference.ReferenceResult]:
    return {
        frozen: reference.train(*folders, batch, dataclasses.replace(SETTINGS, frozen=frozen))
        for frozen in (None, "visual")
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_like_plain_autograd(
    name: str, folders: Any, batch: Any, truths: Any, one_rank: Any, two_ranks: Any
):
    frozen = "visual" if "frozen" in name else None
    truth, pool = truths[frozen], {1: one_rank, 2: two_ranks}[LAYOUTS[name].ranks]
    trained_like(truth, args_of(folders, LAYOUTS[name].flags), batch, pool, frozen=bool(frozen))
    levels = [weight for weight in truth.weights if ".deepstack_merger_list." in weight]
    assert len(levels) == 2 * 6 and (set(levels) <= set(truth.gradients)) is not bool(frozen)


@pytest.mark.slow
def test_positions_are_those_of_transformers(folders: Any):
    model = reference.load_model(folders[0])
    sizes = [(1, 8, 4), (1, 2, 10)]
    prompt = vision.prompt(sizes, torch.Generator().manual_seed(1))
    tokens, grids = torch.tensor([*prompt, 5, 6, 7]), torch.tensor(sizes)
    kinds = (tokens == vision.IMAGE).int()[None]
    expected, _ = model.model.get_rope_index(tokens[None], mm_token_type_ids=kinds, image_grid_thw=grids)
    ours = mrope_positions(tokens, len(prompt), grids, VisionTokens(vision.IMAGE, vision.VIDEO, vision.MERGE))
    assert torch.equal(ours, expected[:, 0])
