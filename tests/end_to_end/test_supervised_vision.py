"""Supervised training on conversations with images, in first and in later turns, against transformers' own loss."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slimrl.tiny.vision_task import Counting, split_countings
from tests.end_to_end import harness
from tests.end_to_end.conftest import Tiny, make_seeing
from tests.end_to_end.test_supervised import FLAGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
IMAGE = "<|image_pad|>"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_seeing(tmp_path_factory.mktemp("seeing"), 0)


def turns(role: str, text: str, answer: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}, {"role": "assistant", "content": answer}]


def rows(pictures: list[Counting]) -> list[dict[str, Any]]:
    """Conversations with an image in the first turn, in both, in the second alone, and in none."""
    found = []
    for number, picture in enumerate(pictures):
        other = pictures[number - 1]
        first = turns("user", "<image>squares?", str(picture.answer)), [picture]
        both = first[0] + turns("user", "and<image>now?", str(other.answer)), [picture, other]
        later = turns("user", "1+1=", "2") + turns("user", "squares?<image>", str(picture.answer)), [picture]
        messages, seen = (first, both, later, (turns("user", "2+2=", "4"), []))[number % 4]
        uris = [uri for one in seen for uri in one.row()["images"]]  # type: ignore[attr-defined]
        found.append({"messages": messages, "images": uris})
    return found


def batches(folder: Path, data: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What transformers' model takes, one conversation at a time; the tokens are found turn by turn."""
    from transformers import AutoTokenizer
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    from slimrl.rollout.dataset.images import ImageProcessor

    tokenizer, processor = AutoTokenizer.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
    for row in data:
        images = [ImageProcessor(str(folder)).read(uri) for uri in row["images"]]
        found = processor(images=images, return_tensors="pt") if images else {}
        counts = iter((found["image_grid_thw"].prod(1) // 4).tolist() if images else [])
        ids, labels = [], []
        for message in row["messages"]:
            pieces = message["content"].split("<image>")
            content = pieces[0]
            for piece in pieces[1:]:
                content += f"<|vision_start|>{IMAGE * next(counts)}<|vision_end|>{piece}"
            is_trained = message["role"] == "assistant"
            head, words = f"<|im_start|>{message['role']}\n", f"{content}<|im_end|>"
            for text, chosen in ((head, False), (words, is_trained), ("\n", False)):
                own = tokenizer(text, add_special_tokens=False)["input_ids"]
                ids += own
                labels += own if chosen else [-100] * len(own)
        tokens = torch.tensor([ids])
        kinds = (tokens == tokenizer.convert_tokens_to_ids(IMAGE)).int()
        yield {"input_ids": tokens, "labels": torch.tensor([labels]), "mm_token_type_ids": kinds, **found}


def transformers_loss(folder: Path, data: list[dict[str, Any]]) -> float:
    """The mean over the assistant's tokens of all rows, of the loss that transformers' model returns."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    total = tokens = 0.0
    for batch in batches(folder, data):
        trained = int((batch["labels"] != -100).sum())
        with torch.no_grad():
            total += trained * model(**batch).loss.item()
        tokens += trained
    return total / tokens


def write(path: Path, data: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    return path


def test_loss_of_conversations_with_images_is_that_of_transformers_and_falls(seeing: Tiny, tmp_path: Path):
    trained, held_out = (rows(pictures) for pictures in split_countings(seed=3, train_size=8, eval_size=8))
    flags = FLAGS | {
        "prompt_data": write(tmp_path / "train.jsonl", trained),
        "multimodal_keys": json.dumps({"image": "images"}),
        "num_rollout": 12,
        "lr": 3e-3,
        "eval_interval": 12,
        "eval_prompt_data": ["unseen", write(tmp_path / "held-out.jsonl", held_out)],
        "eval_input_key": "messages",
        "save_hf": tmp_path / "hf_{rollout_id}",
        "save": tmp_path / "checkpoints",
        "save_interval": 6,
    }
    started = harness.start("train.py", seeing.flags(**flags), tmp_path, "sft", seeing.home)
    done = started.finish(300)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    losses = done.steps("loss")
    assert losses[0] == pytest.approx(transformers_loss(seeing.model, trained), rel=1e-5)
    assert losses[6] == pytest.approx(transformers_loss(tmp_path / "hf_5", trained), rel=1e-5)
    assert losses[-1] < losses[0] / 2
    for entry, folder in zip(done.summary["eval"]["history"], (seeing.model, tmp_path / "hf_11"), strict=True):
        loss = transformers_loss(folder, held_out)
        assert entry["metrics"] == pytest.approx({"eval/unseen": math.exp(loss), "eval/unseen-loss": loss}, rel=1e-5)
    blind = [{**row, "images": row["images"][:1] * len(row["images"])} for row in trained]
    blind[0]["images"] = trained[1]["images"][1:]
    assert abs(transformers_loss(tmp_path / "hf_11", blind) - losses[-1]) > 1e-3  # the loss depends on the pixels
