"""LoRA adapters of a vision-language model train, behind a frozen tower, as plain float64 autograd trains A and B."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import accuracy
from tests.megatron import layouts, lora_truth, vision
from tests.megatron.layouts import CP2, FULL, PP2, SETTINGS, SPREAD, TP2_SP, Layout
from tests.megatron.test_lora import train_adapters
from tests.megatron.test_vision import args_of

LAYOUTS = {
    "Qwen2.5-VL, layers recomputed": Layout(1, FULL),
    "Qwen2.5-VL, TP2 SP": Layout(2, TP2_SP),
    "Qwen2.5-VL, CP2": Layout(2, CP2 | SPREAD),
    "Qwen3-VL, PP2": Layout(2, PP2),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By family: the base, its adapters, the rollout, and what float64 makes of them."""
    root, found = tmp_path_factory.mktemp("adapted"), {}
    for name, save, values in (
        ("Qwen2.5-VL", vision.save_qwen2_5_vl, vision.PATCH_VALUES),
        ("Qwen3-VL", vision.save_qwen3_vl, vision.DEEP_PATCH_VALUES),
    ):
        base = save(root / name, seed=2)
        adapter = lora_truth.save_adapter(base, root / f"{name}-adapter")
        rollout = vision.without_sampled_image(vision.rollout(seed=5, values=values))
        found[name] = base, adapter, rollout, lora_truth.train(base, adapter, rollout, SETTINGS)
    return found


def flags(base: Path, adapter: Path) -> dict[str, Any]:
    own = {"lora_rank": lora_truth.RANK, "lora_alpha": lora_truth.ALPHA, "lora_load": str(adapter)}
    return own | {"load": None, "ref_load": str(base)}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_behind_a_tower_train_like_plain_autograd(name: str, models: Any, one_rank: Any, two_ranks: Any):
    layout = LAYOUTS[name]
    base, adapter, rollout, truth = models[name.split(",")[0]]
    args = args_of((base, base), layout.flags | flags(base, adapter))
    result, *others = (one_rank if layout.ranks == 1 else two_ranks).run(train_adapters, args, rollout)
    assert all(other == result.metrics for other in others)
    accuracy.near("loss", [step["loss"] for step in result.metrics], truth.losses, rel=2e-5, abs=1e-6)
    accuracy.near("loss", [step["grad_norm"] for step in result.metrics], truth.gradient_norms, rel=2e-5)
    assert set(result.adapters) == set(truth.adapters)
    accuracy.below("weights", layouts.relative_error(result.adapters, truth.adapters), 1e-5)
    stored = lora_truth.published_weights(base)
    assert all(torch.equal(result.base[name], stored[name]) for name in result.base)  # the tower too
    if layout.ranks == 1:
        assert result.trained == sum(value.numel() for value in truth.adapters.values())
