"""Rollouts of several turns in which the environment shows images, half of them about a video, too: tokens,
log-probabilities, training.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import torch

from examples.look_again import LOOKS, MESSAGE
from slimrl.data.sample import Sample
from slimrl.observability.rollout_dump import read_dump
from slimrl.rollout.dataset.images import ImageProcessor, data_uri, images_of
from slimrl.rollout.dataset.videos import Video, videos_of
from slimrl.tiny.pictures import split_countings
from tests.end_to_end import harness
from tests.end_to_end.conftest import SEEING, Tiny, make_seeing
from tests.videos import video

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
IMAGE = "<|image_pad|>"
LIMIT = 1e-4  # of differences between log-probabilities with equal images


@pytest.fixture(scope="module", params=SEEING)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A toy that ends its answers."""
    return make_seeing(tmp_path_factory.mktemp("seeing"), 60, request.param)


@pytest.fixture(scope="module")
def run(seeing: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[list[Sample]]]:
    """The finished run, and the samples of its rollouts."""
    folder = tmp_path_factory.mktemp("turns")
    rows = [problem.row() for problem in split_countings(seed=7, train_size=8, eval_size=0)[0]]
    for number, row in enumerate(rows):
        data = base64.b64encode(video(12, 84, 64, seed=number)).decode()
        row["videos"] = [f"data:video/mp4;base64,{data}"] * (number % 2)
        row["prompt"][0]["content"] = "<video>" * (number % 2) + row["prompt"][0]["content"]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = seeing.flags(
        custom_generate_function_path="examples.look_again.generate",
        prompt_data=folder / "train.jsonl",
        multimodal_keys=json.dumps({"image": "images", "video": "videos"}),
        rollout_max_response_len=192,
        num_rollout=2,
        rollout_batch_size=4,
        use_kl_loss=None,
        kl_loss_coef=None,
        kl_loss_type=None,
        sglang_disable_radix_cache=None,
        save_debug_rollout_data=folder / "dumps/{rollout_id}.jsonl",
        actor_num_gpus_per_node=2,
        colocate=True,
    )
    done = harness.start("train.py", flags, folder, "turns", seeing.home).finish(400)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    return done, [read_dump(folder / f"dumps/{number}.jsonl").samples for number in range(2)]


def test_rollout_and_training_agree_on_every_trained_token(run: Any):
    done, _ = run
    assert len(done.steps("train_rollout_logprob_abs_diff_max")) == 2
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < LIMIT


def test_tokens_of_turns_and_images_are_in_place(run: Any, seeing: Tiny):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(seeing.model)
    image = tokenizer.convert_tokens_to_ids(IMAGE)
    message = MESSAGE.replace("<image>", f"<|vision_start|>{IMAGE * 6}<|vision_end|>")
    looked = 0
    for sample in (sample for samples in run[1] for sample in samples):
        response, mask = sample.tokens[sample.prompt_length :], sample.loss_mask
        assert mask is not None
        starts = sample.multimodal_inputs.get("response_starts", [])
        assert len(images_of(sample)) == 1 + len(starts) <= 1 + LOOKS
        for start in starts:
            assert response[start : start + 6] == [image] * 6 and mask[start : start + 6] == [0] * 6
        shown = tokenizer.decode([token for token, trained in zip(response, mask, strict=True) if not trained])
        assert shown == message * len(starts)
        looked += len(starts) == LOOKS
    assert looked >= 4


def scores(
    model: Any, processor: Any, sample: Sample, uris: list[str], image: int, videos: tuple[Video, ...] | None = None
) -> torch.Tensor:
    """transformers' log-probabilities [response tokens] with these images and its own videos, or others."""
    ours = ImageProcessor(model.name_or_path)
    seen = processor(images=[ours.read(uri) for uri in uris], return_tensors="pt")
    if videos := videos or videos_of(sample.multimodal_inputs):
        seen = {**seen, **ours.videos.train_inputs(videos)}
    tokens = torch.tensor([sample.tokens])
    kinds = (tokens == image).int() + 2 * (tokens == ours.tokens.video_token_id).int()
    with torch.no_grad():
        logits = model(tokens, mm_token_type_ids=kinds, **seen).logits[0]
    own = torch.tensor(sample.tokens[sample.prompt_length :])
    return logits[sample.prompt_length - 1 : -1].log_softmax(-1)[torch.arange(len(own)), own]


def test_engine_saw_the_images_of_all_turns(run: Any, seeing: Tiny):
    from transformers import AutoModelForImageTextToText, AutoTokenizer
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    model = AutoModelForImageTextToText.from_pretrained(seeing.model, dtype=torch.float32)
    processor = AutoImageProcessor.from_pretrained(seeing.model)
    image = AutoTokenizer.from_pretrained(seeing.model).convert_tokens_to_ids(IMAGE)
    other = data_uri(split_countings(seed=11, train_size=1, eval_size=0)[0][0].image())
    samples = [one for one in run[1][0] if len(images_of(one)) == 1 + LOOKS][:6]
    blind = []
    for sample in samples:
        trained = torch.tensor(sample.loss_mask).bool()
        starts = sample.multimodal_inputs["response_starts"]
        own, uris = torch.tensor(sample.rollout_log_probs), list(images_of(sample))
        assert (scores(model, processor, sample, uris, image) - own)[trained].abs().max() < LIMIT
        for turn, start in enumerate(starts):  # another picture in this turn changes what follows, and nothing before
            uris[1 + turn : 2 + turn] = [other]
            change = (scores(model, processor, sample, uris, image) - own).abs()
            before = torch.arange(len(own)) < start
            assert change[trained & before].max() < LIMIT
            blind.append(float(change[trained & ~before].max()))
            uris = list(images_of(sample))
    assert min(blind) > LIMIT and max(blind) > 0.1


def test_engine_saw_the_videos(run: Any, seeing: Tiny):
    from transformers import AutoModelForImageTextToText, AutoTokenizer
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    model = AutoModelForImageTextToText.from_pretrained(seeing.model, dtype=torch.float32)
    processor = AutoImageProcessor.from_pretrained(seeing.model)
    image = AutoTokenizer.from_pretrained(seeing.model).convert_tokens_to_ids(IMAGE)
    by_group = {one.group_index: one for one in run[1][0] if videos_of(one.multimodal_inputs)}
    assert len(by_group) == 2
    one, other = by_group.values()
    for sample, foreign in ((one, other), (other, one)):
        trained, own = torch.tensor(sample.loss_mask).bool(), torch.tensor(sample.rollout_log_probs)
        uris = list(images_of(sample))
        assert (scores(model, processor, sample, uris, image) - own)[trained].abs().max() < LIMIT
        blind = scores(model, processor, sample, uris, image, videos_of(foreign.multimodal_inputs)) - own
        assert blind[trained].abs().max() > 10 * LIMIT
