"""The task with pictures: its split, its pictures and its two answers; the toy's tokenizer and processor for images."""

from __future__ import annotations

import base64
import io

import numpy as np
import PIL.Image
import pytest
import torch

from slimrl.tiny.models import FAMILIES, build_family_model, build_tokenizer, save_image_processor
from slimrl.tiny.pictures import (
    BLUE,
    EMPTY,
    RED,
    Counting,
    greedy_accuracy_on_pictures,
    split_countings,
    warm_start_on_pictures,
)
from slimrl.tiny.tasks import WarmStart


def test_answers_count_squares_and_the_noisy_one_overlooks_blue():
    picture = Counting((RED, EMPTY, BLUE, BLUE, EMPTY, RED), (200, 0, 180, 190, 0, 255))
    assert (picture.answer, picture.noisy_answer) == (4, 2)
    pixels = np.asarray(picture.image())
    assert pixels.shape == (56, 84, 3)
    centres = [tuple(pixels[28 * row + 14, 28 * column + 14]) for row in range(2) for column in range(3)]
    assert centres == [(200, 0, 0), (0, 0, 0), (0, 0, 180), (0, 0, 190), (0, 0, 0), (255, 0, 0)]


def test_row_has_the_picture_as_data_uri():
    picture = Counting((RED,) * 6, (200,) * 6)
    row = picture.row()
    assert row["label"] == "6" and row["prompt"] == [{"role": "user", "content": "<image>squares?"}]
    stored = base64.b64decode(row["images"][0].split(",")[1])
    assert np.array_equal(np.asarray(PIL.Image.open(io.BytesIO(stored))), np.asarray(picture.image()))


def test_split_depends_on_its_seed_and_repeats_no_picture():
    train, held_out = split_countings(seed=0, train_size=400, eval_size=100)
    assert (len(train), len(held_out)) == (400, 100)
    assert len({picture.image().tobytes() for picture in (*train, *held_out)}) == 500
    assert (train, held_out) == split_countings(seed=0, train_size=400, eval_size=100)
    assert train != split_countings(seed=1, train_size=400, eval_size=100)[0]
    share = np.mean([BLUE in picture.fields for picture in train])
    assert share == pytest.approx(0.6, abs=0.08)


@pytest.mark.slow
def test_blind_model_cannot_count(tmp_path):
    """Without its tower's weights the warm-started model is right as often as one that always gives one answer."""
    tokenizer = build_tokenizer(max_length=2048, vision=True)
    model = build_family_model("qwen2_5_vl", tokenizer, seed=0)
    save_image_processor(FAMILIES["qwen2_5_vl"].config["vision_config"], tmp_path)
    train, held_out = split_countings(seed=0, train_size=800, eval_size=128)
    warm_start_on_pictures(model, tokenizer, train, str(tmp_path), plan=WarmStart(steps=200), seed=0)
    without_blue = np.mean([BLUE not in picture.fields for picture in held_out])
    assert greedy_accuracy_on_pictures(model, tokenizer, held_out, str(tmp_path)) == pytest.approx(
        without_blue, abs=0.05
    )
    with torch.no_grad():
        model.model.visual.merger.mlp[2].weight.zero_()
    common = max(np.bincount([picture.answer for picture in held_out])) / len(held_out)
    assert greedy_accuracy_on_pictures(model, tokenizer, held_out, str(tmp_path)) <= common + 0.02
