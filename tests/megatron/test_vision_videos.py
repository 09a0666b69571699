"""Videos, images and text in one rollout train as transformers and plain autograd in float64, in every kind of layout.

Qwen2.5-VL's videos have their frames together and later in time; those of Qwen3-VL stand apart among timestamps.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron import ranks, reference, vision
from tests.megatron.layouts import CP2, DYNAMIC, EP2, OVERLAP, PP2, SETTINGS, SPREAD, TP2_SP, Layout
from tests.megatron.test_vision import FROZEN, args_of, trained_like

pytestmark = pytest.mark.slow

SAVE = {"qwen2.5": vision.save_qwen2_5_vl, "qwen3": vision.save_qwen3_vl, "qwen3-moe": vision.save_qwen3_vl_moe}
PACKED = DYNAMIC | {"max_tokens_per_gpu": 120}
COMMON = {
    "1 rank, packed": Layout(1, PACKED),
    "TP2 SP": Layout(2, TP2_SP),
    "CP2, packed": Layout(2, CP2 | SPREAD | PACKED),
}
LAYOUTS = {
    "qwen2.5": COMMON
    | {
        "1 rank, the tower frozen": Layout(1, FROZEN),
        "DP2, distributed optimizer, overlapped": Layout(2, OVERLAP),
        "PP2": Layout(2, PP2),
    },
    "qwen3": COMMON | {"PP2": Layout(2, PP2)},
    "qwen3-moe": {"EP2, packed": Layout(2, EP2 | PACKED), "EP2 CP2": Layout(2, EP2 | CP2 | SPREAD)},
}


@dataclasses.dataclass
class Model:
    """Two folders of one architecture, a rollout for it, and its training in float64 by the frozen weights."""

    folders: tuple[Path, Path]
    batch: Any
    truths: dict[str | None, reference.ReferenceResult] = dataclasses.field(default_factory=dict)

    def truth(self, frozen: str | None) -> reference.ReferenceResult:
        if frozen not in self.truths:
            settings = dataclasses.replace(SETTINGS, frozen=frozen)
            self.truths[frozen] = reference.train(*self.folders, self.batch, settings)
        return self.truths[frozen]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    found = {}
    for name, save in SAVE.items():
        root, dated = tmp_path_factory.mktemp(name), name != "qwen2.5"
        values = vision.DEEP_PATCH_VALUES if dated else vision.PATCH_VALUES
        folders = save(root / "policy", seed=1), save(root / "reference", seed=2)
        found[name] = Model(folders, vision.rollout_with_videos(5, dated=dated, values=values))
    return found


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in LAYOUTS for layout in LAYOUTS[name]])
def test_every_layout_trains_like_plain_autograd(
    name: str, layout: str, models: dict[str, Model], one_rank: Any, two_ranks: Any
):
    model, chosen = models[name], LAYOUTS[name][layout]
    frozen = "visual" if "frozen" in layout else None
    pool = {1: one_rank, 2: two_ranks}[chosen.ranks]
    trained_like(model.truth(frozen), args_of(model.folders, chosen.flags), model.batch, pool, frozen=bool(frozen))


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_other_video_changes_the_log_probs_of_its_samples(
    name: str, models: dict[str, Model], tmp_path: Path, two_ranks: Any
):
    model, images = models[name], models[name].batch.images
    pixels = torch.randn(images.pixel_values.shape, generator=torch.Generator().manual_seed(9))
    still = images.grids.prod(1).tolist()[0]
    pixels[:still] = images.pixel_values[:still]  # the image of the first two samples stays
    found = []
    for number, shown in enumerate((images, dataclasses.replace(images, pixel_values=pixels))):
        batch = dataclasses.replace(model.batch, images=shown)
        template = str(tmp_path / f"{number}-{{rollout_id}}.pt")
        flags = TP2_SP | {"save_debug_train_data": template, "compute_old_log_probs": "always"}
        two_ranks.run(ranks.train_once, args_of(model.folders, flags), batch)
        samples = torch.load(template.format(rollout_id=0), weights_only=True)["samples"]
        policy = reference.load_model(model.folders[0])
        with torch.no_grad():
            theirs = [reference._log_probs(policy, one, SETTINGS.temperature)[0] for one in reference._split(batch)]
        ours = [torch.as_tensor(sample["train_log_probs"]).double() for sample in samples]
        assert max(float((one - true).abs().max()) for one, true in zip(ours, theirs, strict=True)) < 1e-5
        found.append(ours)
    changes = [float((one - other).abs().max()) for one, other in zip(*found, strict=True)]
    assert min(changes[2:6]) > 1e-2 and [*changes[:2], *changes[6:]] == [0.0] * 4
