"""Qwen3-VL-MoE trains as transformers and plain autograd in float64: a tower in front of layers of experts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.megatron import reference, vision
from tests.megatron.layouts import CP2, DYNAMIC, EP2, ETP2, OVERLAP, PP2, SETTINGS, SPREAD, TP2_SP, Layout
from tests.megatron.test_vision import FROZEN, args_of, trained_like

LAYOUTS = {
    "1 rank, packed": Layout(1, DYNAMIC | {"max_tokens_per_gpu": 80}),
    "1 rank, the tower frozen": Layout(1, FROZEN),
    "DP2, distributed optimizer, overlapped": Layout(2, OVERLAP),
    "EP2": Layout(2, EP2),
    "EP2, distributed optimizer, overlapped, packed": Layout(2, EP2 | OVERLAP | DYNAMIC | {"max_tokens_per_gpu": 80}),
    "TP2 SP": Layout(2, TP2_SP),
    "EP2 TP2 SP": Layout(2, EP2 | TP2_SP),
    "ETP2 TP2 SP": Layout(2, ETP2),
    "PP2": Layout(2, PP2),
    "EP2 CP2": Layout(2, EP2 | CP2 | SPREAD),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("experts")
    return vision.save_qwen3_vl_moe(root / "policy", seed=1), vision.save_qwen3_vl_moe(root / "reference", seed=2)


@pytest.fixture(scope="module")
def batch() -> Any:
    return vision.without_sampled_image(vision.rollout(seed=5, values=vision.DEEP_PATCH_VALUES))


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
    experts = {weight for weight in truth.weights if ".mlp.experts." in weight}
    assert len(experts) == vision.DEEP_LAYERS * 4 * 3 and experts <= set(truth.gradients)
    tower = {weight for weight in truth.weights if ".visual." in weight}
    assert tower and (tower <= set(truth.gradients)) is not bool(frozen)
