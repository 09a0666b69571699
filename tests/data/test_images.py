"""Images as columns of a batch, and positions of tokens and images as transformers has them."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

from slimrl.data.images.batch import IN_PROMPT, BatchImages, by_frames, image_rows, mrope_positions
from slimrl.data.train_batch import RolloutBatch
from slimrl.models.families.vision import VisionTokens
from tests.megatron import vision

TOKENS = VisionTokens(vision.IMAGE, vision.VIDEO, vision.MERGE)
SIZES = {
    "no image": [],
    "one image": [(1, 4, 6)],
    "an image of one token": [(1, 2, 2)],
    "two images": [(1, 8, 4), (1, 2, 10)],
    "three images": [(1, 4, 4), (1, 2, 2), (1, 4, 12)],
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory):
    """transformers' model."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    folder = vision.save_qwen2_5_vl(tmp_path_factory.mktemp("vl"), seed=0)
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)


@pytest.mark.parametrize("name", SIZES)
def test_positions_are_those_of_transformers(name, theirs):
    prompt = vision.prompt(SIZES[name], torch.Generator().manual_seed(1))
    tokens = torch.tensor([*prompt, 5, 6, 7])
    grids = torch.tensor(SIZES[name]) if SIZES[name] else None
    kinds = (tokens == vision.IMAGE).int()[None]
    expected, _ = theirs.model.get_rope_index(tokens[None], mm_token_type_ids=kinds, image_grid_thw=grids)
    assert torch.equal(mrope_positions(tokens, len(prompt), grids, TOKENS), expected[:, 0])


def test_sampled_image_token_counts_as_text():
    prompt = vision.prompt([(1, 4, 4)], torch.Generator().manual_seed(1))
    grids, answer = torch.tensor([(1, 4, 4)]), [7, 8, 9]
    plain = mrope_positions(torch.tensor([*prompt, *answer]), len(prompt), grids, TOKENS)
    answer[1] = vision.IMAGE
    assert torch.equal(mrope_positions(torch.tensor([*prompt, *answer]), len(prompt), grids, TOKENS), plain)


def conversation(seed: int = 1) -> tuple[list[int], list[tuple[int, int, int]], int, list[int]]:
    """Tokens with an image in the prompt and two in the response, their sizes, the prompt's length, their starts."""
    sizes = [(1, 4, 6), (1, 8, 4), (1, 2, 2)]
    first, second, third = (vision.prompt([size], torch.Generator().manual_seed(seed)) for size in sizes)
    starts = [4 + 1, len(second) + 4 + 1]  # words and the token before an image
    return [*first, *second, *third, 5, 6], sizes, len(first), starts


def test_positions_of_images_in_a_response_are_those_of_transformers(theirs):
    ids, sizes, prompt, starts = conversation()
    tokens, grids = torch.tensor(ids), torch.tensor(sizes)
    kinds = (tokens == vision.IMAGE).int()[None]
    expected, _ = theirs.model.get_rope_index(tokens[None], mm_token_type_ids=kinds, image_grid_thw=grids)
    places = [IN_PROMPT, *starts]
    assert torch.equal(mrope_positions(tokens, prompt, grids, TOKENS, places), expected[:, 0])
    assert image_rows(tokens, prompt, TOKENS, grids, places).tolist() == kinds[0].nonzero().squeeze(1).tolist()
    tokens[-1] = vision.IMAGE  # sampled
    assert torch.equal(mrope_positions(tokens, prompt, grids, TOKENS, places), expected[:, 0])


def test_wrong_places_in_a_response_are_an_error():
    ids, sizes, prompt, starts = conversation()
    for wrong in ([starts[0] + 1, starts[1]], [starts[0], len(ids)]):
        with pytest.raises(ValueError, match="the response tokens from .* on are not the .* of one image"):
            mrope_positions(torch.tensor(ids), prompt, torch.tensor(sizes), TOKENS, [IN_PROMPT, *wrong])
    with pytest.raises(ValueError, match="the sample has 14 image tokens, and its 3 images have 16"):
        other = torch.tensor([(1, 4, 6), (1, 8, 4), (1, 2, 4)])
        mrope_positions(torch.tensor(ids), prompt, other, TOKENS, [IN_PROMPT, starts[0], IN_PROMPT])
    one = vision.inputs([(1, 4, 4)], 0)
    with pytest.raises(ValueError, match="row 1 has 1 images and 2 places in its response"):
        BatchImages.of_samples([None, one], [None, {"response_starts": [3, 9]}])


def test_selected_rows_keep_the_places_of_their_images():
    two, one = vision.inputs([(1, 4, 4), (1, 2, 2)], 0), vision.inputs([(1, 4, 4)], 1)
    given = [{"response_starts": [7]}, None, {"images": []}]
    images = BatchImages.of_samples([two, None, one], given)
    assert images is not None and images.starts_of_samples() == [[IN_PROMPT, 7], [], [IN_PROMPT]]
    chosen = images.select(torch.tensor([2, 1, 0, 0]))
    assert chosen is not None
    assert chosen.starts_of_samples() == [[IN_PROMPT], [], [IN_PROMPT, 7], [IN_PROMPT, 7]]
    assert BatchImages.from_tensors(chosen.tensors()).starts.tolist() == chosen.starts.tolist()  # type: ignore[union-attr]


def test_other_number_of_image_tokens_is_an_error():
    tokens = torch.tensor(vision.prompt([(1, 4, 4)], torch.Generator()))
    with pytest.raises(ValueError, match="the prompt has 4 image tokens, and its 1 images have 6"):
        mrope_positions(tokens, len(tokens), torch.tensor([(1, 4, 6)]), TOKENS)
    with pytest.raises(ValueError, match="the prompt has 4 image tokens, and its 0 images have 0"):
        mrope_positions(tokens, len(tokens), None, TOKENS)
    apart = torch.tensor([1, vision.IMAGE, 2, vision.IMAGE, vision.IMAGE, vision.IMAGE])
    with pytest.raises(ValueError, match="the image tokens from token 1 on are not the 4 of one image"):
        mrope_positions(apart, len(apart), torch.tensor([(1, 4, 4)]), TOKENS)


def test_samples_of_a_prompt_share_its_images():
    images = vision.rollout(seed=5).images
    assert images.grids.tolist() == [[1, 4, 6], [1, 8, 4], [1, 2, 2], [1, 6, 10]]
    assert images.counts.tolist() == [1, 1, 1, 1, 2, 2, 0, 0]
    assert images.index.tolist() == [0, 0, 1, 1, 2, 3, 2, 3]
    assert images.pixel_values.shape == (24 + 32 + 4 + 60, vision.PATCH_VALUES)
    pixels, grids = images.in_order()
    assert grids.tolist()[:3] == [[1, 4, 6], [1, 4, 6], [1, 8, 4]] and len(pixels) == 2 * 24 + 2 * 32 + 2 * 64


def test_selected_rows_have_their_own_images_alone():
    batch = vision.rollout(seed=5)
    chosen = batch.select([5, 2, 6])
    assert chosen.images.grids.tolist() == [[1, 8, 4], [1, 2, 2], [1, 6, 10]]
    assert chosen.images.counts.tolist() == [2, 1, 0]
    patches = batch.images.pixel_values.split([24, 32, 4, 60])
    assert torch.equal(chosen.images.in_order()[0], torch.cat([patches[2], patches[3], patches[1]]))
    assert batch.select([6, 7]).images is None


def test_batch_with_images_is_saved_and_loaded_and_pickled(tmp_path):
    batch = vision.rollout(seed=5)
    batch.save(tmp_path / "batch")
    for loaded in (RolloutBatch.load(tmp_path / "batch"), pickle.loads(pickle.dumps(batch))):
        for name, tensor in batch.images.tensors().items():
            assert torch.equal(loaded.images.tensors()[name], tensor), name
    without = batch.select([6, 7])
    without.save(tmp_path / "text")
    assert RolloutBatch.load(tmp_path / "text").images is None


def test_batch_without_images_has_none():
    assert BatchImages.of_samples([None, None]) is None


def test_digest_of_a_samples_images_is_that_of_their_pixels_and_arrangement():
    pixels = torch.arange(32.0).view(16, 2)

    def digest(values: torch.Tensor, *grids: tuple[int, int, int]) -> bytes:
        counts = torch.tensor([len(grids), 0])
        index, starts = torch.arange(len(grids)), torch.full((len(grids),), IN_PROMPT)
        own, none = BatchImages(values, torch.tensor(grids), index, counts, starts).digests()
        assert none == b""
        return own

    wide, moved = digest(pixels, (1, 2, 8)), pixels.clone()
    moved[3, 1] += 1
    assert len({wide, digest(moved, (1, 2, 8)), digest(pixels, (1, 8, 2)), digest(pixels, (1, 2, 4), (1, 2, 4))}) == 4
    assert wide == digest(pixels.clone(), (1, 2, 8)) and len(wide) == 16


VIDEOS = {
    "a video": ([(3, 4, 6)], [1.0]),
    "a video of one frame": ([(1, 4, 6)], [2.2]),
    "two videos": ([(4, 2, 2), (2, 8, 4)], [0.5, 3.9]),
}


@pytest.mark.parametrize("name", VIDEOS)
@pytest.mark.parametrize("dated", [False, True], ids=["qwen2.5", "qwen3"])
def test_positions_of_videos_are_those_of_transformers(name, dated, tmp_path):
    """With an image between two texts before them, and after them; the second half of the tokens is the response."""
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration

    (save, kind) = (
        (vision.save_qwen3_vl, Qwen3VLForConditionalGeneration)
        if dated
        else (vision.save_qwen2_5_vl, Qwen2_5_VLForConditionalGeneration)
    )
    model = kind.from_pretrained(save(tmp_path, seed=0))
    grids, seconds = VIDEOS[name]
    generator = torch.Generator().manual_seed(1)
    image = vision.prompt([(1, 4, 4)], generator)
    first, rest = (
        vision.video_prompt(grids[:1], generator, dated=dated),
        vision.video_prompt(grids[1:], generator, dated=dated),
    )
    tokens = torch.tensor([*image, *first, *image, *rest])
    kinds = (tokens == vision.IMAGE).int() + 2 * (tokens == vision.VIDEO).int()
    inputs = vision.inputs([(1, 4, 4)] * 2, 0) | vision.video_inputs(grids, 1, None if dated else seconds)
    expected, _ = model.model.get_rope_index(
        tokens[None],
        mm_token_type_ids=kinds[None],
        image_grid_thw=inputs["image_grid_thw"],
        video_grid_thw=inputs["video_grid_thw"],
        **({} if dated else {"second_per_grid_ts": inputs["second_per_grid_ts"]}),
    )
    prompt = len(image) + len(first)
    runs = [at for at in range(1, len(tokens)) if kinds[at] != kinds[at - 1] and kinds[at]]
    given = {
        "response_starts": [at - prompt for at in runs if at >= prompt and kinds[at] == 1],
        "video_response_starts": [at - prompt for at in runs if at >= prompt and kinds[at] == 2],
    }
    images = BatchImages.of_samples([inputs], [given])
    assert images is not None
    where = images.grids, TOKENS, images.starts.tolist(), images.seconds_of_samples()[0]
    assert torch.equal(mrope_positions(tokens, prompt, *where), expected[:, 0])
    rows = image_rows(tokens, prompt, where[1], where[0], *where[2:])
    assert sorted(rows.tolist()) == kinds.nonzero().squeeze(1).tolist()
    with pytest.raises(ValueError, match="the prompt has .* video tokens, and its .* videos have"):
        mrope_positions(tokens, len(tokens), images.grids[:-1], TOKENS, (), where[3][:-1])


def test_videos_are_saved_and_are_part_of_a_digest(tmp_path):
    batch = vision.rollout_with_videos(5, dated=False)
    batch.save(tmp_path / "batch")
    loaded = RolloutBatch.load(tmp_path / "batch").images
    assert loaded is not None and loaded.seconds.tolist() == batch.images.seconds.tolist()
    assert loaded.seconds_of_samples()[4] == pytest.approx([-1.0, 1.0, 2.2])
    chosen = batch.select([2, 6]).images
    assert chosen.seconds.tolist() == [1.5] and chosen.counts.tolist() == [1, 0]
    later = dataclasses.replace(chosen, seconds=chosen.seconds + 1)
    assert chosen.digests()[0] != later.digests()[0]


def test_tower_of_transformers_sees_each_patch_in_time_alone(theirs):
    """Engines and the trainer may give it the frames of a video apart."""
    inputs = vision.video_inputs([(3, 8, 12), (2, 4, 4)], 1, [1.0, 1.0])
    with torch.no_grad():
        whole, apart = (
            theirs.model.visual(inputs["pixel_values_videos"], grid_thw=grids).pooler_output
            for grids in (inputs["video_grid_thw"], by_frames(inputs["video_grid_thw"]))
        )
    assert (whole - apart).abs().max() < 1e-5 * whole.abs().max()
