"""Other pixels change the trainer's log-probabilities, in every family that sees, layout and packing.

A model that has silently stopped seeing trains on without any error. The changes are those of transformers in float64;
the log-probabilities of samples without an image stay as they are. The engines' side is in
tests/families/test_serving.py, after each way of updating their weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.megatron import ranks, reference, vision
from tests.megatron.layouts import CP2, DYNAMIC, EP2, ETP2, PP2, SETTINGS, TP2_SP, Layout
from tests.megatron.test_vision import args_of

pytestmark = pytest.mark.slow
PACKED = DYNAMIC | {"max_tokens_per_gpu": 80}
LAYOUTS = {
    "1 rank": Layout(1, {}),
    "1 rank, packed": Layout(1, PACKED),
    "DP2": Layout(2, {}),
    "TP2 SP, packed": Layout(2, TP2_SP | PACKED),
    "PP2": Layout(2, PP2),
    "CP2, packed": Layout(2, CP2 | DYNAMIC | {"max_tokens_per_gpu": 60}),
}
OF_EXPERTS = {"EP2": Layout(2, EP2), "ETP2 TP2 SP": Layout(2, ETP2)}
FAMILIES: dict[str, tuple[Callable[..., Path], int]] = {
    "Qwen2.5-VL": (vision.save_qwen2_5_vl, vision.PATCH_VALUES),
    "Qwen3-VL": (vision.save_qwen3_vl, vision.DEEP_PATCH_VALUES),
    "Qwen3-VL-MoE": (vision.save_qwen3_vl_moe, vision.DEEP_PATCH_VALUES),
}
WITH_IMAGES = 6  # the last two of the eight samples have none


@dataclasses.dataclass
class Seen:
    """A family: its folder, the rollout with its own and with other images, and transformers' change per sample."""

    name: str
    folders: tuple[Path, Path]
    shown: list[Any]
    changes: list[Tensor]


def log_probs(folder: Path, batch: Any) -> list[Tensor]:
    """transformers' of each sample's response, in float64."""
    model = reference.load_model(folder)
    with torch.no_grad():
        return [reference._log_probs(model, one, SETTINGS.temperature)[0] for one in reference._split(batch)]


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    save, values = FAMILIES[request.param]
    folder = save(tmp_path_factory.mktemp("seen") / "model", seed=1)
    batch = vision.without_sampled_image(vision.rollout(seed=5, values=values))
    assert batch.images is not None
    pixels = torch.randn(batch.images.pixel_values.shape, generator=torch.Generator().manual_seed(9))
    other = dataclasses.replace(batch, images=dataclasses.replace(batch.images, pixel_values=pixels))
    found = [log_probs(folder, one) for one in (batch, other)]
    changes = [after - before for before, after in zip(*found, strict=True)]
    return Seen(request.param, (folder, folder), [batch, other], changes)


CASES = [
    (family, name) for family in FAMILIES for name in (LAYOUTS | OF_EXPERTS if family == "Qwen3-VL-MoE" else LAYOUTS)
]


@pytest.mark.parametrize(("seen", "name"), CASES, indirect=["seen"])
def test_other_pixels_change_the_log_probs_as_in_transformers(
    name: str, seen: Seen, one_rank: Any, two_ranks: Any, tmp_path: Path
):
    layout = (LAYOUTS | OF_EXPERTS)[name]
    templates = [str(tmp_path / f"{number}_{{rollout_id}}.pt") for number in range(2)]
    runs = [
        (args_of(seen.folders, layout.flags | {"save_debug_train_data": one, "compute_old_log_probs": "always"}), shown)
        for one, shown in zip(templates, seen.shown, strict=True)
    ]
    {1: one_rank, 2: two_ranks}[layout.ranks].run(ranks.train_each, runs)
    own, other = (torch.load(one.format(rollout_id=0), weights_only=True)["samples"] for one in templates)
    changes = [
        torch.as_tensor(after["train_log_probs"]).double() - torch.as_tensor(before["train_log_probs"]).double()
        for before, after in zip(own, other, strict=True)
    ]
    far = max(float((ours - true).abs().max()) for ours, true in zip(changes, seen.changes, strict=True))
    least = min(float(change.abs().max()) for change in changes[:WITH_IMAGES])
    print(f"{seen.name}, {name}: every sample changes by {least:.2g} or more, {far:.1e} from transformers")
    assert least > 1e-2 and far < 2e-5
    # an expert's matrix product has rows of all samples of a micro-batch, and rounds by their number
    rounding = 1e-5 if seen.name == "Qwen3-VL-MoE" else 0.0
    assert all(change.abs().max() <= rounding for change in changes[WITH_IMAGES:])
