"""The task with pictures: its split, its pictures and its two answers; the toy's tokenizer and processor for images."""

from __future__ import annotations

import asyncio
import base64
import io

import numpy as np
import PIL.Image
import pytest
import torch

from examples import look_again
from slimrl.data.sample import Sample
from slimrl.rollout.dataset.images import ImageProcessor
from slimrl.rollout.dataset.videos import VideoProcessor
from slimrl.rollout.generation.multi_turn import TURN_STARTS
from slimrl.tiny.models import FAMILIES, build_family_model, build_tokenizer, save_image_processor
from slimrl.tiny.pictures import (
    AGAIN,
    BLUE,
    EMPTY,
    RED,
    Counting,
    Seen,
    greedy_accuracy_on_pictures,
    split_countings,
    warm_start_on_pictures,
)
from slimrl.tiny.tasks import WarmStart, encode_answers


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


PICTURE = Counting((RED, EMPTY, BLUE, BLUE, EMPTY, RED), (200, 0, 180, 190, 0, 255))


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Tokenizer, model and folder, with processors."""
    folder = tmp_path_factory.mktemp("toy")
    tokenizer = build_tokenizer(max_length=2048, vision=True)
    model = build_family_model("qwen2_5_vl", tokenizer, seed=0)
    model.config.save_pretrained(folder)
    save_image_processor(FAMILIES["qwen2_5_vl"].config["vision_config"], folder)
    return tokenizer, model.eval(), folder


def test_film_shows_one_column_a_second(toy):
    row = PICTURE.film_row()
    assert row["prompt"] == [{"role": "user", "content": "<video>squares?"}] and row["label"] == "4"
    film = VideoProcessor(str(toy[2])).read(base64.b64decode(row["videos"][0].split(",")[1]))
    assert (len(film.frames), film.fps) == (6, 2)
    shown = [np.asarray(PIL.Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1])))) for uri in film.frames]
    for number, frame in enumerate(shown):
        assert frame.shape == (56, 56, 3) and frame[:, 28:].max() < 40  # the right half is empty, but for the codec
        for place in (number // 2, 3 + number // 2):  # the fields of a column
            colour = np.zeros(3)
            if (kind := PICTURE.fields[place]) != EMPTY:
                colour[0 if kind == RED else 2] = PICTURE.brightness[place]
            assert np.abs(frame[28 * (place // 3) + 14, 14] - colour).max() < 40


def test_turns_are_those_of_the_example(toy):
    tokenizer, _, folder = toy
    sample = Sample(prompt="p", tokens=[1], multimodal_inputs={"images": PICTURE.row()["images"]}, metadata={})
    processor = ImageProcessor(str(folder))
    for starts, half in (([0], PICTURE.halves()[0]), ([0, 9], PICTURE.halves()[1])):
        sample.metadata[TURN_STARTS] = starts
        shown = asyncio.run(look_again.show(sample, processor, "4"))
        assert shown.text == AGAIN
        assert np.array_equal(np.asarray(processor.read(shown.images[0])), np.asarray(half))


@pytest.mark.parametrize("shown", [{"turns": 3}, {"films": True}], ids=str)
def test_logits_of_answers_are_those_before_each_of_their_tokens(shown, toy):
    tokenizer, model, folder = toy
    seen = Seen.of([PICTURE, Counting((RED,) * 6, (200,) * 6)], tokenizer, str(folder), **shown)
    answers = encode_answers(tokenizer, [3, 4]).repeat(1, shown.get("turns", 1))
    with torch.no_grad():
        found = seen.logits(model, torch.tensor([1, 0]), answers)
        answers[1, -3] = answers[0, -3]  # the last number: it changes the logits of the two tokens after it alone
        other = seen.logits(model, torch.tensor([1, 0]), answers)
    assert found.shape[:2] == answers.shape
    changed = (found != other).any(dim=-1)
    assert changed.nonzero().tolist() == [[1, answers.shape[1] - 2], [1, answers.shape[1] - 1]]
    assert not torch.equal(found[0], found[1])  # other pixels


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
