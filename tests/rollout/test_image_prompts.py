"""Prompts with images: the rows of all formats, their tokens and tensors as transformers' processor makes them."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import io
import json
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow
import pyarrow.parquet
import pytest
import torch

from slimrl.data.images import ImageColumn
from slimrl.data.prompt_format import InvalidRowsError, PromptFormat
from slimrl.data.sample import Sample
from slimrl.engines.protocol import PromptImages
from slimrl.rollout.dataset import image_decoder, images
from slimrl.rollout.dataset.prompt_dataset import Prompt, PromptTokenizer, load_prompts
from slimrl.rollout.sft_rollout import fill_conversation
from slimrl.tiny.models import (
    FAMILIES,
    IMAGE_PAD,
    build_family_model,
    build_tokenizer,
    publish_config,
    save_image_processor,
)

FAMILY = "qwen2_5_vl"
QUESTION = "<image>How many squares?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy model with tokenizer and image processor."""
    made = tmp_path_factory.mktemp("toy")
    tokenizer = build_tokenizer(max_length=2048, vision=True)
    build_family_model(FAMILY, tokenizer, seed=0).save_pretrained(made)
    tokenizer.save_pretrained(made)
    publish_config(FAMILY, made)
    save_image_processor(FAMILIES[FAMILY].config["vision_config"], made)
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(max_length=2048, vision=True)


def form(folder: Path, **changes: Any) -> PromptFormat:
    values: dict[str, Any] = {
        "input_key": "prompt",
        "label_key": None,
        "metadata_key": "metadata",
        "tool_key": "tools",
        "apply_chat_template": True,
        "chat_template_kwargs": {},
        "max_prompt_len": None,
        "keep_messages": False,
        "images": ImageColumn("images", str(folder)),
    }
    return PromptFormat(**values | changes)


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> PIL.Image.Image:
    values = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return PIL.Image.fromarray(values).convert(mode)


def encoded(image: PIL.Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def uri(image: PIL.Image.Image, kind: str = "PNG") -> str:
    return f"data:image/{kind.lower()};base64,{base64.b64encode(encoded(image, kind)).decode()}"


def one(row: dict[str, Any], folder: Path, tokenizer: Any) -> Any:
    (made,) = PromptTokenizer(form(folder), tokenizer).make([row], ["rows.jsonl:1"])
    return made


@pytest.mark.parametrize("sizes", [[(84, 56)], [(100, 71)], [(300, 250), (56, 56)], [(1500, 1100), (9, 30)]])
def test_tokens_and_tensors_are_those_of_transformers(sizes, folder, tokenizer):
    """The processor's classes by hand: transformers' processor of both needs a package for videos."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    pictures = [picture(*size, seed=number) for number, size in enumerate(sizes)]
    made = one({"prompt": "<image>" * len(sizes) + "Hi", "images": [uri(p) for p in pictures]}, folder, tokenizer)
    expected = Qwen2VLImageProcessorPil.from_pretrained(folder)(images=pictures, return_tensors="pt")
    (found,) = images.training_inputs([made.sample(group_index=0, index=0)], str(folder))
    assert torch.equal(found["pixel_values"], expected["pixel_values"])
    assert torch.equal(found["image_grid_thw"], expected["image_grid_thw"])
    pads = "".join(
        f"<|vision_start|>{IMAGE_PAD * (grid.prod() // 4)}<|vision_end|>" for grid in expected["image_grid_thw"]
    )
    text = f"<|im_start|>user\n{pads}Hi<|im_end|>\n<|im_start|>assistant\n"
    assert made.token_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_image_is_resized_before_it_leaves_its_process(folder, tokenizer):
    made = one({"prompt": QUESTION, "images": [uri(picture(1500, 1100))]}, folder, tokenizer)
    sent = PIL.Image.open(io.BytesIO(base64.b64decode(made.images[0].split(",")[1])))
    (found,) = images.training_inputs([made.sample(group_index=0, index=0)], str(folder))
    _, rows, columns = found["image_grid_thw"][0].tolist()
    assert (sent.height, sent.width) == (14 * rows, 14 * columns) != (1100, 1500)


@pytest.mark.parametrize("limits", [(56 * 56, 28 * 28 * 1280), (784, 100_352), (200_704, 1_003_520)])
def test_size_is_that_of_transformers(limits):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = np.random.default_rng(0)
    sides = [(1, 1), (3, 500), (27, 29), (28, 28), (6000, 6000), *rng.integers(14, 4000, (3000, 2)).tolist()]
    for height, width in sides:
        if max(height, width) <= 200 * min(height, width):
            expected = smart_resize(height, width, 28, *limits)
            assert image_decoder.ImageSize(28, *limits, resample=3).of(height, width) == expected, (height, width)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """No log of requests."""


class Slow(Quiet):
    def do_GET(self) -> None:
        """At /silent nothing, else endless bytes, a few at a time; until the client leaves."""
        if self.path != "/silent":
            self.send_response(200)
            self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                time.sleep(0.05)
                self.wfile.write(b"" if self.path == "/silent" else b"\x89PNG")
                if select.select([self.connection], [], [], 0)[0]:
                    return


@pytest.fixture
def served(tmp_path: Path):
    """The URL of a server of `tmp_path`."""
    yield from serving(functools.partial(Quiet, directory=str(tmp_path)))


@pytest.fixture
def slow():
    """The URL of a server that does not come to an end."""
    yield from serving(Slow)


def serving(handler: Any) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_every_kind_of_item_is_the_same_image(folder, tokenizer, tmp_path, served):
    image = picture(84, 56)
    path = tmp_path / "image.png"
    path.write_bytes(encoded(image))
    text = base64.b64encode(encoded(image)).decode()
    kinds = [str(path), uri(image), encoded(image), {"bytes": encoded(image)}, {"bytes": text}]
    kinds += [{"path": str(path), "bytes": None}, f"{served}/image.png"]
    made = [one({"prompt": QUESTION, "images": [kind]}, folder, tokenizer) for kind in kinds]
    made.append(one({"prompt": QUESTION, "images": uri(image)}, folder, tokenizer))  # without a list
    assert all(isinstance(prompt, Prompt) for prompt in made), made
    assert len({(prompt.images, tuple(prompt.token_ids)) for prompt in made}) == 1
    decoded = PIL.Image.open(io.BytesIO(base64.b64decode(made[0].images[0].split(",")[1])))
    assert np.array_equal(np.asarray(decoded), np.asarray(image))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK"])
def test_engines_get_the_pixels_that_training_has(mode, folder, tokenizer):
    image = picture(84, 56, mode=mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"
    made = one({"prompt": QUESTION, "images": [uri(image, kind)]}, folder, tokenizer)
    decoded = PIL.Image.open(io.BytesIO(base64.b64decode(made.images[0].split(",")[1])))
    stored = PIL.Image.open(io.BytesIO(encoded(image, kind))).convert("RGB")
    assert decoded.mode == "RGB" and np.array_equal(np.asarray(decoded), np.asarray(stored))


def test_parquet_rows_of_hugging_face_datasets(folder, tokenizer, tmp_path):
    rows = [
        {"prompt": QUESTION, "images": [{"bytes": encoded(picture(84, 56, seed=1)), "path": None}]},
        {"prompt": "no image", "images": []},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    loaded = load_prompts(str(tmp_path / "rows.parquet"), form(folder), tokenizer)
    assert [len(prompt.images) for prompt in loaded.prompts] == [1, 0]
    assert loaded.prompts[1].sample(group_index=0, index=0).multimodal_inputs is None


def test_parts_of_messages_are_places_of_images(folder, tokenizer):
    parts = [{"type": "image"}, {"type": "text", "text": "How many squares?"}]
    listed = {"prompt": [{"role": "user", "content": parts}], "images": [uri(picture(56, 56))]}
    plain = {"prompt": [{"role": "user", "content": QUESTION}], "images": [uri(picture(56, 56))]}
    assert one(listed, folder, tokenizer).token_ids == one(plain, folder, tokenizer).token_ids


BROKEN = encoded(picture(84, 56))[:200]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "<image>"}, "have 1 places for images (<image>) and column 'images' (--multimodal-keys) has 0"),
        ({"prompt": "Hi", "images": [encoded(picture(56, 56))]}, "have 0 places for images"),
        ({"prompt": "<image>", "images": [b"text"]}, "images[0] (--multimodal-keys) cannot be read as an image"),
        (
            {"prompt": "<image>", "images": [BROKEN]},
            "images[0] (--multimodal-keys) cannot be read as an image (OSError",
        ),
        ({"prompt": "<image>", "images": [encoded(picture(900, 4))]}, "absolute aspect ratio must be smaller than 200"),
        ({"prompt": "<image>", "images": ["http://127.0.0.1:9/x.png"]}, "cannot be downloaded from http://127.0.0.1:9"),
        ({"prompt": [{"role": "user", "content": [{"type": "audio"}]}]}, "a message has a part of type 'audio'"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]},
            "a message has its image inside: put it into the column of --multimodal-keys",
        ),
    ],
)
def test_bad_image_is_named_with_its_row(row, reason, folder, tokenizer, tmp_path):
    if "images" in row and isinstance(row["images"][0], bytes):
        row = row | {"images": [{"bytes": base64.b64encode(row["images"][0]).decode()}]}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [{"prompt": "text"}, row])))
    with pytest.raises(InvalidRowsError) as caught:
        load_prompts(str(tmp_path / "rows.jsonl"), form(folder), tokenizer)
    assert f"{tmp_path}/rows.jsonl:2: " in str(caught.value) and reason in str(caught.value)


@pytest.mark.parametrize(
    ("path", "limit", "reason"),
    [
        ("silent", "DOWNLOAD_TIMEOUT_S", "timed out)"),
        ("drops", "DOWNLOAD_LIMIT_S", " bytes in 0.3 s)"),
        ("drops", "MAX_BYTES", "more than 100 bytes: use a smaller one)"),
    ],
)
def test_server_that_does_not_come_to_an_end_is_named(path, limit, reason, folder, tokenizer, slow, monkeypatch):
    monkeypatch.setattr(images, limit, 100 if limit == "MAX_BYTES" else 0.3)
    made = one({"prompt": QUESTION, "images": [f"{slow}/{path}"]}, folder, tokenizer)
    assert made.reason.startswith(f"images[0] (--multimodal-keys) cannot be downloaded from {slow}/{path} (")
    assert made.reason.endswith(reason)


def test_huge_image_is_refused_before_it_is_decoded(folder, tokenizer):
    huge = encoded(PIL.Image.new("1", (20000, 6000)))
    made = one({"prompt": QUESTION, "images": [huge]}, folder, tokenizer)
    assert made.reason == ("images[0] (--multimodal-keys) has 20000 x 6000 pixels, more than 100000000: scale it down")


def test_image_that_takes_too_long_is_named_and_the_next_one_is_decoded():
    decoders, image = image_decoder.ImageDecoders(1), encoded(PIL.Image.new("RGB", (6000, 6000)))
    small = decoders.decode(encoded(picture(56, 84)))
    assert (small.width, small.height) == (56, 84)
    decoders._time_limit_s = 0.05
    with pytest.raises(ValueError, match=r"takes more than 0.05 s to decode: scale it down"):
        decoders.decode(image)
    decoders._time_limit_s = 60
    assert decoders.decode(encoded(picture(56, 84))) == small
    decoders.close()


def test_image_that_ends_its_process_is_named():
    decoders = image_decoder.ImageDecoders(1)
    assert decoders.decode(encoded(picture(56, 56))).width == 56
    (process,) = decoders._free.queue
    process.kill()
    process.wait()
    assert decoders.decode(encoded(picture(56, 56))).width == 56  # by another one
    (process,) = decoders._free.queue
    process.send_signal(signal.SIGSTOP)
    threading.Timer(0.2, process.kill).start()
    with pytest.raises(ValueError, match=r"cannot be read as an image \(its process ended with code -9\)"):
        decoders.decode(encoded(picture(56, 56)))
    decoders.close()


def test_memory_of_a_decoder_is_bounded():
    """The program itself, with a limit that its imports fit and the picture does not."""
    program = (
        "import sys; from slimrl.rollout.dataset import image_decoder as one; "
        "one.MEMORY_LIMIT_BYTES = 300 << 20; one.main(sys.stdin.buffer, sys.stdout.buffer)"
    )
    file = encoded(PIL.Image.new("L", (10000, 9000)))  # 270 MB in RGB
    done = subprocess.run(
        [sys.executable, "-c", program], input=b"%d\n" % len(file) + file, capture_output=True, timeout=60, check=True
    )
    assert b"cannot be read as an image (MemoryError" in done.stdout


def test_template_without_images_is_an_error(folder, tokenizer):
    import copy

    blind = copy.deepcopy(tokenizer)
    blind.chat_template = "{% for message in messages %}{{ message['role'] }}{% endfor %}"
    made = one({"prompt": QUESTION, "images": [uri(picture(56, 56))]}, folder, blind)
    assert "the rendered prompt has 0 image tokens (283) for 1 images" in made.reason


def test_long_prompt_counts_the_tokens_of_images(folder, tokenizer):
    row = {"prompt": QUESTION, "images": [uri(picture(280, 280))]}
    (made,) = PromptTokenizer(form(folder, max_prompt_len=100), tokenizer).make([row], ["rows.jsonl:1"])
    assert made.num_tokens > 100


def test_samples_of_a_prompt_share_tensors_and_survive_a_dump(folder, tokenizer):
    made = one({"prompt": QUESTION, "images": [uri(picture(84, 56))]}, folder, tokenizer)
    first, second = (made.sample(group_index=0, index=index) for index in range(2))
    again = Sample.from_dict(json.loads(json.dumps(second.to_dict())))
    text = Sample(prompt="Hi", tokens=[1])
    found = images.training_inputs([first, again, text], str(folder))
    assert found[0] is found[1] and found[2] is None
    with pytest.raises(ValueError, match="has images, and --hf-checkpoint is no vision-language model"):
        images.training_inputs([first], None)


def test_engine_gets_one_token_for_each_image():
    sent = PromptImages(("a", "b"), token_id=9)
    assert sent.one_each([1, 9, 9, 9, 2, 9, 3]) == [1, 9, 2, 9, 3]
    with pytest.raises(ValueError, match="the tokens have 3 images"):
        sent.one_each([1, 9, 2, 9, 3, 9])


def filled(folder: Path, tokenizer: Any, max_tokens: int | None = None) -> Sample:
    """A conversation with images of 2 x 3 and 2 x 2 tokens, in the first turn and after the first answer."""
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "<image>and now?"},
        {"role": "assistant", "content": "2"},
    ]
    row = {"prompt": messages, "images": [uri(picture(84, 56)), uri(picture(56, 56, seed=1))]}
    conversation = form(folder, apply_chat_template=False, keep_messages=True)
    (made,) = PromptTokenizer(conversation, tokenizer).make([row], ["rows.jsonl:1"])
    sample = made.sample(group_index=0, index=0)
    fill_conversation(
        sample, tokenizer, "qwen", {}, max_tokens=max_tokens, processor=images.ImageProcessor(str(folder))
    )
    return sample


def test_conversation_has_the_tokens_of_its_images_and_trains_none_of_them(folder: Path, tokenizer: Any):
    sample, image = filled(folder, tokenizer), tokenizer.convert_tokens_to_ids(IMAGE_PAD)
    assert sample.tokens.count(image) == 6 + 4 and sample.tokens[: sample.prompt_length].count(image) == 6
    response = sample.tokens[sample.prompt_length :]
    assert sample.multimodal_inputs["response_starts"] == [response.index(image)]
    trained = [token for token, chosen in zip(response, sample.loss_mask, strict=True) if chosen]
    assert tokenizer.decode(trained) == "3<|im_end|>2<|im_end|>"
    text = f"<|vision_start|>{IMAGE_PAD * 4}<|vision_end|>and now?"
    assert text in tokenizer.decode(response)
    assert sample.response.startswith("3<|im_end|>") and sample.response.endswith("2<|im_end|>\n")


def test_cut_leaves_whole_images(folder: Path, tokenizer: Any):
    whole, image = filled(folder, tokenizer), tokenizer.convert_tokens_to_ids(IMAGE_PAD)
    first = whole.prompt_length
    start = first + whole.multimodal_inputs["response_starts"][0]
    for limit in range(first + 1, len(whole.tokens) + 1):
        sample = filled(folder, tokenizer, limit)
        has_second = limit >= start + 4
        length = limit if has_second else min(limit, start)
        assert sample.tokens == whole.tokens[:length] and len(sample.loss_mask) == length - first
        assert sample.multimodal_inputs["response_starts"] == ([start - first] if has_second else [])
        assert len(images.images_of(sample)) == 1 + has_second
        grids = sample.multimodal_train_inputs["image_grid_thw"]
        assert int(grids.prod(1).sum()) // 4 == sample.tokens.count(image) == 6 + 4 * has_second
    with pytest.raises(ValueError, match="tokens before the first one to train on"):
        filled(folder, tokenizer, first)
