"""Prompts with videos: their frames, tokens and tensors are those of transformers' processors of the model.

transformers' video processors need torchvision, which the environment lacks. Their functions that choose frames, choose
the size and make the patches need no more of it than a name (`theirs`).
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from slimrl.data.images import ImageColumn
from slimrl.data.prompt_format import PromptFormat
from slimrl.data.sample import Sample
from slimrl.engines.sglang.inputs import videos as sent
from slimrl.rollout.dataset import images, video_decoder
from slimrl.rollout.dataset.images import SampleImages
from slimrl.rollout.dataset.prompt_dataset import PromptTokenizer, load_prompts
from slimrl.rollout.dataset.videos import VideoProcessor
from slimrl.rollout.sft_rollout import fill_conversation
from slimrl.tiny.models import (
    FAMILIES,
    build_family_model,
    build_tokenizer,
    publish_config,
    save_image_processor,
)
from tests.rollout.test_image_prompts import Quiet, form, picture, served, uri  # noqa: F401
from tests.rollout.test_vision_turns import Engine
from tests.videos import video

QUESTION = "<video>How many squares?"


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy model with tokenizer and processors."""
    made = tmp_path_factory.mktemp(request.param)
    tokenizer = build_tokenizer(max_length=2048, vision=True)
    build_family_model(request.param, tokenizer, seed=0).save_pretrained(made)
    tokenizer.save_pretrained(made)
    publish_config(request.param, made)
    save_image_processor(FAMILIES[request.param].config["vision_config"], made)
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(max_length=2048, vision=True)


@pytest.fixture(scope="module")
def theirs() -> Any:
    """transformers' classes, imported with a name in the place of torchvision."""
    names = [
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["torchvision.transforms.v2"].functional = sys.modules[names[-1]]  # type: ignore[attr-defined]
        qwen2, qwen3 = (
            importlib.import_module(f"transformers.models.{name}.video_processing_{name}")
            for name in ("qwen2_vl", "qwen3_vl")
        )
    return {False: qwen2, True: qwen3}


def column(folder: Path) -> ImageColumn:
    return ImageColumn("images", str(folder), "videos")


def one(row: dict[str, Any], folder: Path, tokenizer: Any, **changes: Any) -> Any:
    shape: PromptFormat = form(folder, images=column(folder), **changes)
    (made,) = PromptTokenizer(shape, tokenizer).make([row], ["rows.jsonl:1"])
    return made


def reference(theirs: Any, processor: VideoProcessor, data: bytes) -> tuple[torch.Tensor, list[int], Any]:
    """Patches, grid and metadata that transformers' functions make of a file, which PyAV decodes; PIL resizes."""
    from transformers.video_utils import read_video_pyav

    settings = processor.frames
    module = theirs[settings.by_timestamps]
    kind = module.Qwen3VLVideoProcessor if settings.by_timestamps else module.Qwen2VLVideoProcessor
    own = types.SimpleNamespace(
        fps=settings.fps,
        num_frames=None,
        temporal_patch_size=settings.temporal_patch_size,
        min_frames=settings.min_frames,
        max_frames=settings.max_frames,
    )
    chosen, metadata = read_video_pyav(
        io.BytesIO(data), lambda metadata, **_: np.asarray(kind.sample_frames(own, metadata)).tolist()
    )

    def resize(image: torch.Tensor, size: Any, resample: Any) -> torch.Tensor:
        frames = image.reshape(-1, *image.shape[-3:]).permute(0, 2, 3, 1).numpy()
        resized = [
            np.asarray(PIL.Image.fromarray(frame).resize((size.width, size.height), PIL.Image.Resampling.BICUBIC))
            for frame in frames
        ]
        return (
            torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2).reshape(*image.shape[:-2], size.height, size.width)
        )

    def normalized(videos: torch.Tensor, _: bool, scale: float, __: bool, mean: Any, std: Any) -> torch.Tensor:
        mean, std = (torch.tensor(value)[:, None, None] for value in (mean, std))
        return (videos.double() * scale - mean) / std

    own.convert_to_rgb, own.resize, own.rescale_and_normalize = lambda videos: videos, resize, normalized
    from transformers.image_utils import SizeDict

    limits = SizeDict(shortest_edge=settings.min_pixels, longest_edge=settings.max_pixels)
    made = kind._preprocess(
        own,
        [torch.from_numpy(np.stack(chosen)).permute(0, 3, 1, 2)],
        do_convert_rgb=True,
        do_resize=True,
        size=limits,
        resample=None,
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        patch_size=settings.patch_size,
        temporal_patch_size=settings.temporal_patch_size,
        merge_size=settings.merge_size,
        return_tensors="pt",
    )
    return made["pixel_values_videos"], made["video_grid_thw"][0].tolist(), metadata


SHAPES = [(16, 84, 56, 8), (33, 128, 96, 8), (7, 300, 260, 30), (40, 64, 64, 10), (2, 64, 64, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_and_tensors_are_those_of_transformers(shape, folder, tokenizer, theirs):
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    frames, width, height, rate = shape
    data, processor = video(frames, width, height, rate=rate), VideoProcessor(str(folder))
    made = one({"prompt": "look:" + QUESTION, "videos": [data]}, folder, tokenizer)
    patches, grid, metadata = reference(theirs, processor, data)
    (found,) = images.training_inputs([made.sample(group_index=0, index=0)], str(folder))
    assert found["video_grid_thw"].tolist() == [grid]
    assert found["pixel_values_videos"].dtype == torch.float32
    assert (found["pixel_values_videos"] - patches).abs().max() < 1e-6
    dated = processor.frames.by_timestamps
    kind = Qwen3VLProcessor if dated else Qwen2_5_VLProcessor
    own = types.SimpleNamespace(
        video_processor=types.SimpleNamespace(merge_size=2, temporal_patch_size=2),
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
    )
    own._calculate_timestamps = lambda *given: Qwen3VLProcessor._calculate_timestamps(own, *given)
    inputs = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata]}
    place = kind.replace_video_token(own, inputs, 0)
    text = f"<|im_start|>user\nlook:<|vision_start|>{place}<|vision_end|>How many squares?<|im_end|>\n"
    expected = tokenizer(text + "<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    assert made.token_ids.tolist() == expected
    if not dated:
        assert found["second_per_grid_ts"].tolist() == pytest.approx([2 / metadata.sampled_fps])
    else:
        assert "second_per_grid_ts" not in found and place.count("seconds>") == grid[0]


def test_frames_and_sizes_are_chosen_as_transformers_chooses_them(folder, theirs):
    settings = VideoProcessor(str(folder)).frames
    module = theirs[settings.by_timestamps]
    kind = module.Qwen3VLVideoProcessor if settings.by_timestamps else module.Qwen2VLVideoProcessor
    own = types.SimpleNamespace(
        fps=settings.fps, num_frames=None, temporal_patch_size=2, min_frames=4, max_frames=settings.max_frames
    )
    for total in [*range(2, 130), 299, 300, 1000, 1799, 4096, 9999]:
        for rate in (2.0, 8.0, 15.0, 24000 / 1001, 25.0, 29.97, 30.0, 60.0):
            expected = kind.sample_frames(own, types.SimpleNamespace(total_num_frames=total, fps=rate)).tolist()
            assert settings.indices(total, rate) == expected, (total, rate)
    for height in (32, 57, 64, 100, 333, 1080):
        for width in (40, 64, 90, 640, 1920):
            for frames in (2, 5, 16, 32):
                limits = {"min_pixels": settings.min_pixels, "max_pixels": settings.max_pixels}
                factor = settings.patch_size * 2
                if settings.by_timestamps:
                    expected = module.smart_resize(frames, height, width, 2, factor, **limits)
                else:
                    expected = module.smart_resize(height, width, factor, **limits)
                assert settings.size(frames, height, width) == expected


def test_every_kind_of_item_is_the_same_video(folder, tokenizer, tmp_path, served):  # noqa: F811
    data = video(16, 84, 64)
    path = tmp_path / "video.mp4"
    path.write_bytes(data)
    text = base64.b64encode(data).decode()
    kinds = [str(path), f"data:video/mp4;base64,{text}", data, {"bytes": data}, {"bytes": text}]
    kinds += [{"path": str(path), "bytes": None}, f"{served}/video.mp4"]
    made = [one({"prompt": QUESTION, "videos": [kind]}, folder, tokenizer) for kind in kinds]
    made.append(one({"prompt": QUESTION, "videos": data}, folder, tokenizer))  # without a list
    assert len({(prompt.videos, tuple(prompt.token_ids)) for prompt in made}) == 1 and made[0].videos


def test_videos_stand_beside_images_in_the_order_of_the_messages(folder, tokenizer):
    parts = [{"type": "video"}, {"type": "image"}, {"type": "text", "text": "and <video>?"}]
    row = {"prompt": [{"role": "user", "content": parts}], "images": [uri(picture(84, 64))]}
    row["videos"] = [video(8, 84, 64, seed=1), video(16, 84, 64, seed=2)]
    made = one(row, folder, tokenizer)
    assert len(made.images) == 1 and len(made.videos) == 2
    sample = made.sample(group_index=0, index=0)
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    (found, copied) = images.training_inputs([sample, again], str(folder))
    assert found is copied
    assert found["image_grid_thw"].shape == (1, 3) and found["video_grid_thw"].shape == (2, 3)
    text = tokenizer.decode(made.token_ids)
    assert text.index("<|video_pad|>") < text.index("<|image_pad|>") < text.rindex("<|video_pad|>")


def test_engine_gets_the_tokens_places_and_pixels_of_training(folder, tokenizer):
    row = {"prompt": "<image>" + QUESTION, "images": [uri(picture(84, 64))], "videos": [video(16, 84, 64)]}
    sample = one(row, folder, tokenizer).sample(group_index=0, index=0)
    ours = SampleImages(str(folder))
    request = sent.payload(sample.tokens, ours.of(sample)["images"])
    assert request["input_ids"] == sample.tokens
    (found,) = images.training_inputs([sample], str(folder))
    (moving,), (still,) = request["video_data"], request["image_data"]
    made = sent.tensors(ours.processor, json.loads(json.dumps(moving))) | sent.tensors(ours.processor, still)
    for name in ("pixel_values", "image_grid_thw", "pixel_values_videos"):
        assert torch.equal(made[name], found[name])
    grid = found["video_grid_thw"][0].tolist()
    together = ours.processor.videos.by_timestamps  # else SGLang's tower gets each patch in time as an image
    assert made["video_grid_thw"].tolist() == ([grid] if together else [[1, *grid[1:]]] * grid[0])
    for item, token in ((still, ours.processor.tokens.image_token_id), (moving, ours.processor.tokens.video_token_id)):
        places = [at for first, last in item["offsets"] for at in range(first, last + 1)]
        assert places == [at for at, own in enumerate(sample.tokens) if own == token]
        last = [axis[-1] for axis in item["mrope_positions"]]
        assert last == [len(sample.tokens) - 1 + item["mrope_position_delta"]] * 3
    assert len(moving["offsets"]) == (grid[0] if together else 1)


def test_request_of_a_custom_function_has_the_videos_of_its_sample(folder, tokenizer):
    sample = one({"prompt": QUESTION, "videos": [video(8, 64, 64)]}, folder, tokenizer).sample(group_index=0, index=0)
    engine, asked = SampleImages(str(folder)), Engine([1])
    asyncio.run(engine.engine_of(asked, sample).generate(sample.tokens, {}))
    ((ids, seen),) = asked.asked
    assert ids == sample.tokens and seen is not None and seen.videos is not None and seen.data == ()
    with pytest.raises(ValueError, match="would leave out the sample's images"):
        asyncio.run(engine.engine_of(asked, sample).ask("/generate", {}))
    with pytest.raises(ValueError, match="the sample has images, and --hf-checkpoint is no vision-language model"):
        SampleImages(None).of(sample)
    sample.tokens[sample.tokens.index(tokenizer.convert_tokens_to_ids("<|video_pad|>"))] = 5
    with pytest.raises(ValueError, match="video tokens, and its"):
        engine.of(sample)


NO_VIDEO = b"no video at all"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "<video>"}, "have 1 places for videos (<video>) and column 'videos' (--multimodal-keys) has 0"),
        ({"prompt": "Hi", "videos": [NO_VIDEO]}, "have 0 places for videos"),
        ({"prompt": "<video>", "videos": [NO_VIDEO]}, "videos[0] (--multimodal-keys) cannot be decoded as a video"),
        ({"prompt": "<video>", "videos": ["http://127.0.0.1:9/x.mp4"]}, "cannot be downloaded from http://127.0.0.1:9"),
        (
            {"prompt": "<video>", "videos": ["nowhere.mp4"]},
            "videos[0] (--multimodal-keys) is 'nowhere.mp4', which is no",
        ),
        ({"prompt": "<video>", "videos": [3]}, "videos[0] (--multimodal-keys) is of type int"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]},
            "a message has its video inside: put it into the column of --multimodal-keys",
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "audio"}]}]}, "a message has a part of type 'audio'"),
    ],
)
def test_bad_video_is_named(row, reason, folder, tokenizer):
    assert reason in one(row, folder, tokenizer).reason


def test_video_without_a_column_is_named(folder, tokenizer):
    (made,) = PromptTokenizer(form(folder), tokenizer).make([{"prompt": QUESTION}], ["rows.jsonl:1"])
    assert made.reason == (
        "the messages have 1 places for videos (<video>) and --multimodal-keys names no column of videos: add it, as in"
        ' {"video": "videos"}'
    )


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"MAX_STORED_FRAMES": 10}, "has 16 frames, more than 10: cut it"),
        ({"MAX_STORED_PIXELS": 1000}, "has frames of 84 x 64 pixels, more than 1000: scale it down"),
        ({"MAX_CHOSEN_BYTES": 1000}, "gives 4 frames of"),
    ],
)
def test_huge_video_is_named(limits, reason, folder, monkeypatch):
    for name, value in limits.items():
        monkeypatch.setattr(video_decoder, name, value)
    settings = VideoProcessor(str(folder)).frames
    with pytest.raises(ValueError, match=reason):
        video_decoder._decoded(video(16, 84, 64), settings)


def test_broken_videos_are_named(folder, tokenizer):
    whole = video(40, 84, 64)
    for data in (whole[: len(whole) // 2], b"\0" * 5000, encoded_picture()):
        made = one({"prompt": QUESTION, "videos": [data]}, folder, tokenizer)
        assert made.reason.startswith("videos[0] (--multimodal-keys) "), made.reason


def encoded_picture() -> bytes:
    """A file that FFmpeg opens as a video of one frame."""
    buffer = io.BytesIO()
    picture(84, 64).save(buffer, "PNG")
    return buffer.getvalue()


def test_video_that_takes_too_long_is_named(folder):
    with pytest.raises(ValueError, match="takes more than 0.01 s to decode: cut it, or scale it down"):
        video_decoder.decode(video(16, 84, 64), VideoProcessor(str(folder)).frames, time_limit_s=0.01)


def test_file_with_a_frame_less_than_it_declares_is_read(folder, monkeypatch):
    data, settings = video(40, 84, 64), VideoProcessor(str(folder)).frames
    measured = video_decoder._measured
    monkeypatch.setattr(video_decoder, "_measured", lambda data: (measured(data)[0] + 1, *measured(data)[1:]))
    head, pixels = video_decoder._decoded(data, settings)
    # Qwen2.5-VL's processor does not choose the last frame, so that its absence is never seen
    assert head["total"] == (40 if settings.by_timestamps else 41) and len(pixels) == len(head["indices"])


def test_parquet_rows_have_videos(folder, tokenizer, tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": QUESTION, "videos": [video(8, 64, 64)]}, {"prompt": "no video", "videos": []}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    shape = form(folder, images=ImageColumn(None, str(folder), "videos"))
    loaded = load_prompts(str(tmp_path / "rows.parquet"), shape, tokenizer)
    assert [len(prompt.videos) for prompt in loaded.prompts] == [1, 0]


def conversation(folder: Path, tokenizer: Any) -> Any:
    """A row with a video in the first turn, an image in the second one, and a video in the third."""
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "<image>and now?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "<video>and here?"},
        {"role": "assistant", "content": "1"},
    ]
    row = {"prompt": messages, "images": [uri(picture(84, 64))]}
    row["videos"] = [video(8, 84, 64), video(16, 64, 64, seed=1)]
    return one(row, folder, tokenizer, apply_chat_template=False, keep_messages=True)


def filled(made: Any, folder: Path, tokenizer: Any, max_tokens: int | None = None) -> Sample:
    sample: Sample = made.sample(group_index=0, index=0)
    fill_conversation(
        sample, tokenizer, "qwen", {}, max_tokens=max_tokens, processor=images.ImageProcessor(str(folder))
    )
    return sample


def test_conversation_trains_no_token_of_its_videos_and_a_cut_leaves_whole_ones(folder, tokenizer):
    made = conversation(folder, tokenizer)
    whole, pad = filled(made, folder, tokenizer), tokenizer.convert_tokens_to_ids("<|video_pad|>")
    response = whole.tokens[whole.prompt_length :]
    trained = [token for token, chosen in zip(response, whole.loss_mask, strict=True) if chosen]
    assert tokenizer.decode(trained) == "3<|im_end|>2<|im_end|>1<|im_end|>"
    starts = whole.multimodal_inputs["video_response_starts"]
    runs = [at for at, token in enumerate(response) if token == pad and response[at - 1] != pad]
    assert starts == runs and len(images.videos_of(whole.multimodal_inputs)) == 2
    expected = images.ImageProcessor(str(folder)).tokens
    assert expected.video_token_id == pad
    images._positions(whole, whole.tokens, whole.multimodal_train_inputs, expected)
    for limit in range(whole.prompt_length + 1, len(whole.tokens) + 1):
        if limit % 9 == 0:
            sample = filled(made, folder, tokenizer, limit)
            assert sample.tokens == whole.tokens[: len(sample.tokens)]
            images._positions(sample, sample.tokens, sample.multimodal_train_inputs, expected)
