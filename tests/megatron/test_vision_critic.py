"""A critic that sees images is trained, tower and decoder, as transformers' model with a row of weights in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.megatron import test_critic, vision
from tests.megatron.layouts import CP2, DYNAMIC, PP2, SPREAD, TP2_SP, Layout
from tests.megatron.test_vision import args_of

LAYOUTS = {
    "Qwen2.5-VL": Layout(1, DYNAMIC | {"max_tokens_per_gpu": 80}),
    "Qwen2.5-VL, TP2 SP": Layout(2, TP2_SP),
    "Qwen2.5-VL, CP2": Layout(2, CP2 | SPREAD),
    "Qwen3-VL, PP2": Layout(2, PP2),
}


@pytest.fixture(scope="module")
def head() -> Tensor:
    return 0.3 * torch.randn(1, 64, generator=torch.Generator().manual_seed(11))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, head: Tensor) -> dict[str, Any]:
    """By family: the folder, the rollout, and what float64 makes of them."""
    root, found = tmp_path_factory.mktemp("critic"), {}
    for name, save, values in (
        ("Qwen2.5-VL", vision.save_qwen2_5_vl, vision.PATCH_VALUES),
        ("Qwen3-VL", vision.save_qwen3_vl, vision.DEEP_PATCH_VALUES),
    ):
        folder: Path = save(root / name, seed=2)
        rollout = vision.without_sampled_image(vision.rollout(seed=5, values=values))
        found[name] = folder, rollout, test_critic.truth(folder, head, rollout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_critic_that_sees_images_is_trained_as_by_plain_autograd(
    name: str, models: Any, head: Tensor, one_rank: Any, two_ranks: Any
):
    layout = LAYOUTS[name]
    folder, rollout, true = models[name.split(",")[0]]
    args = test_critic.critic_alone(args_of((folder, folder), layout.flags))
    found = (one_rank if layout.ranks == 1 else two_ranks).run(test_critic.train, args, rollout, head)
    test_critic.assert_as_truth(found, rollout, true)
