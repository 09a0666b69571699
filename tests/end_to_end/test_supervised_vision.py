"""Supervised training on conversations with images and a video, and on preferences, against transformers' own loss."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slimrl.tiny.pictures import Counting, split_countings
from tests.end_to_end import harness, test_preference
from tests.end_to_end.conftest import SEEING, Tiny, make_seeing
from tests.end_to_end.test_supervised import FLAGS
from tests.videos import video

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"


@pytest.fixture(scope="module", params=SEEING)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_seeing(tmp_path_factory.mktemp("seeing"), 0, request.param)


def turns(role: str, text: str, answer: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}, {"role": "assistant", "content": answer}]


def rows(pictures: list[Counting]) -> list[dict[str, Any]]:
    """Conversations with an image in the first turn, in both, in the second alone, in none, and one with a video."""
    found = []
    for number, picture in enumerate(pictures):
        other = pictures[number - 1]
        first = turns("user", "<image>squares?", str(picture.answer)), [picture]
        both = first[0] + turns("user", "and<image>now?", str(other.answer)), [picture, other]
        later = turns("user", "1+1=", "2") + turns("user", "squares?<image>", str(picture.answer)), [picture]
        messages, seen = (first, both, later, (turns("user", "2+2=", "4"), []))[number % 4]
        uris = [uri for one in seen for uri in one.row()["images"]]  # type: ignore[attr-defined]
        found.append({"messages": messages, "images": uris, "videos": []})
    messages = turns("user", "<video>moves?", "1") + turns("user", "squares?<image>", str(pictures[0].answer))
    data = f"data:video/mp4;base64,{base64.b64encode(video(16, 84, 64)).decode()}"
    found[4] = {"messages": messages, "images": pictures[0].row()["images"], "videos": [data]}
    return found


def batches(folder: Path, data: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What transformers' model takes, one conversation at a time; the tokens are found turn by turn."""
    from transformers import AutoTokenizer
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    from slimrl.rollout.dataset.images import ImageProcessor

    tokenizer, processor = AutoTokenizer.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
    ours = ImageProcessor(str(folder))
    for row in data:
        images = [ours.read(uri) for uri in row["images"]]
        videos = [ours.read_video(uri) for uri in row.get("videos", ())]
        found = processor(images=images, return_tensors="pt") if images else {}
        found = {**found, **(ours.videos.train_inputs(videos) if videos else {})}
        counts = (found["image_grid_thw"].prod(1) // 4).tolist() if images else []
        tokens_of = {
            "image": iter([IMAGE * count for count in counts]),
            "video": iter([tokenizer.decode(ours.videos.token_ids(one, tokenizer)) for one in videos]),
        }
        ids, labels = [], []
        for message in row["messages"]:
            pieces = re.split("<(image|video)>", message["content"])
            content = pieces[0]
            for kind, piece in zip(pieces[1::2], pieces[2::2], strict=True):
                content += f"<|vision_start|>{next(tokens_of[kind])}<|vision_end|>{piece}"
            is_trained = message["role"] == "assistant"
            head, words = f"<|im_start|>{message['role']}\n", f"{content}<|im_end|>"
            for text, chosen in ((head, False), (words, is_trained), ("\n", False)):
                own = tokenizer(text, add_special_tokens=False)["input_ids"]
                ids += own
                labels += own if chosen else [-100] * len(own)
        tokens = torch.tensor([ids])
        image, moving = tokenizer.convert_tokens_to_ids([IMAGE, VIDEO])
        kinds = (tokens == image).int() + 2 * (tokens == moving).int()
        yield {"input_ids": tokens, "labels": torch.tensor([labels]), "mm_token_type_ids": kinds, **found}


def transformers_loss(folder: Path, data: list[dict[str, Any]]) -> float:
    """The mean over the assistant's tokens of all rows, of the loss that transformers' model returns."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
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
        "multimodal_keys": json.dumps({"image": "images", "video": "videos"}),
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


def pairs(pictures: list[Counting]) -> list[dict[str, Any]]:
    """Of each picture its number of squares, preferred to that without the blue ones, or to one more.

    The prompt of every other row has two turns.
    """
    found = []
    for number, picture in enumerate(pictures):
        opening = turns("user", "1+1=", "2") if number % 2 else []
        prompt = [*opening, {"role": "user", "content": "<image>squares?"}]
        wrong = picture.noisy_answer if picture.noisy_answer != picture.answer else picture.answer + 1
        answers = {"chosen": str(picture.answer), "rejected": str(wrong)}
        found.append({"prompt": prompt, **answers, "images": picture.row()["images"]})
    return found


def answer_log_probs(folder: Path, data: list[dict[str, Any]], side: str) -> torch.Tensor:
    """The sum over the tokens of the last turn, of transformers' model: float64 [pairs]."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)
    chats = [
        {"messages": [*row["prompt"], {"role": "assistant", "content": row[side]}], "images": row["images"]}
        for row in data
    ]
    sums = []
    for batch in batches(folder, chats):
        labels = batch.pop("labels")[0]
        answer = 2  # a digit and the end of the turn, before the newline that the template adds
        positions = (labels != -100).nonzero().flatten()[-answer:]
        with torch.no_grad():
            logits = model(**batch).logits[0].log_softmax(-1)
        sums.append(logits[positions - 1, labels[positions]].sum())
    return torch.stack(sums)


@pytest.mark.parametrize(("seeing", "rollouts"), [("Qwen2.5-VL", 40), ("Qwen3-VL", 80)], indirect=["seeing"])
def test_preferences_about_images_are_learned_with_the_loss_of_transformers(
    seeing: Tiny, rollouts: int, tmp_path: Path
):
    trained, held_out = (pairs(pictures) for pictures in split_countings(seed=5, train_size=320, eval_size=24))
    flags = test_preference.FLAGS | {
        "prompt_data": write(tmp_path / "train.jsonl", trained),
        "multimodal_keys": json.dumps({"image": "images"}),
        "input_key": "prompt",
        "rollout_batch_size": 16,
        "num_rollout": rollouts,
        "lr": 3e-3,
        "preference_beta": 0.1,
        "eval_interval": rollouts,
        "eval_prompt_data": ["unseen", write(tmp_path / "held-out.jsonl", held_out)],
        "eval_input_key": "prompt",
        "save_hf": tmp_path / "hf_{rollout_id}",
        "save": tmp_path / "checkpoints",
    }
    started = harness.start("train.py", seeing.flags(**flags), tmp_path, "dpo", seeing.home)
    done = started.finish(400)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    assert done.steps("loss")[0] == pytest.approx(math.log(2), rel=1e-6)
    last_export = tmp_path / f"hf_{rollouts - 1}"
    gains = [
        answer_log_probs(last_export, held_out, side) - answer_log_probs(seeing.model, held_out, side)
        for side in ("chosen", "rejected")
    ]
    margins = 0.1 * (gains[0] - gains[1])
    last = done.summary["eval"]["history"][-1]["metrics"]
    assert last["eval/unseen-loss"] == pytest.approx(float(torch.nn.functional.softplus(-margins).mean()), rel=1e-4)
    assert last["eval/unseen-reward_margin"] == pytest.approx(float(margins.mean()), rel=1e-4)
    assert last["eval/unseen"] == pytest.approx(float((margins > 0).double().mean())) and last["eval/unseen"] >= 0.85
