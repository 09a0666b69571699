"""The tiny task with images: count the squares of a picture; and the warm start that teaches it with a known error.

A picture has two rows of three fields, each empty or with a red or blue square; a field is one token of the model. A
split depends only on its seed, and no eval picture is in train. The warm start trains on both answers of a picture,
with a weight of 70% for the one that overlooks blue squares. Afterwards greedy decoding is right exactly for pictures
without blue squares, and reinforcement learning can teach the others. A model that does not see the picture is right
for fewer than half of them.
"""

from __future__ import annotations

import base64
import functools
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from slimrl.tiny.task import WarmStart, encode_answers, train_on_mixture

ROWS, COLUMNS = 2, 3
FIELD = 28  # pixels of a side
EMPTY, RED, BLUE = range(3)
QUESTION = "<image>squares?"
BLUE_SHARE = 0.6  # of pictures with a blue square


@dataclass(frozen=True)
class Counting:
    """One picture: its fields, row by row, and the brightness of each, 0 to 255."""

    fields: tuple[int, ...]
    brightness: tuple[int, ...]

    @property
    def answer(self) -> int:
        return sum(field != EMPTY for field in self.fields)

    @property
    def noisy_answer(self) -> int:
        """The number of red squares (the right answer if there is no blue one)."""
        return self.fields.count(RED)

    def image(self) -> PIL.Image.Image:
        """84 x 56 pixels: a square fills its field but for a margin."""
        pixels = np.zeros((ROWS * FIELD, COLUMNS * FIELD, 3), np.uint8)
        for place, (field, brightness) in enumerate(zip(self.fields, self.brightness, strict=True)):
            top, left = place // COLUMNS * FIELD + 4, place % COLUMNS * FIELD + 4
            if field != EMPTY:
                pixels[top : top + FIELD - 8, left : left + FIELD - 8, 0 if field == RED else 2] = brightness
        return PIL.Image.fromarray(pixels)

    def row(self) -> dict[str, object]:
        """The line of a jsonl file: messages under ``prompt``, the answer under ``label``, a data URI in ``images``."""
        buffer = io.BytesIO()
        self.image().save(buffer, "PNG")
        uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        return {"prompt": [{"role": "user", "content": QUESTION}], "label": str(self.answer), "images": [uri]}


def split_countings(*, seed: int, train_size: int, eval_size: int) -> tuple[list[Counting], list[Counting]]:
    """Samples ``(train, eval)`` pictures, no two of them equal: squares have a random brightness."""
    rng = random.Random(seed)
    found: dict[Counting, None] = {}
    while len(found) < train_size + eval_size:
        kinds = (EMPTY, RED, BLUE) if rng.random() < BLUE_SHARE else (EMPTY, RED)
        fields = tuple(rng.choice(kinds) for _ in range(ROWS * COLUMNS))
        if BLUE in kinds and BLUE not in fields:
            continue
        found[Counting(fields, tuple(rng.randrange(160, 256) * (field != EMPTY) for field in fields))] = None
    pictures = list(found)
    return pictures[:train_size], pictures[train_size:]


@dataclass(frozen=True)
class Seen:
    """Prompts with their pictures: token ids int64 [prompts, tokens], and the tensors of transformers' processor."""

    tokens: Tensor
    pixel_values: Tensor  # float32 [prompts, patches, values]
    grid: Tensor  # int64 [3], of every picture
    image_token_id: int

    @classmethod
    def of(cls, problems: Sequence[Counting], tokenizer: PreTrainedTokenizerFast, folder: str) -> Seen:
        """The prompts after the chat template, with the image processor in `folder`."""
        processor = AutoImageProcessor.from_pretrained(folder)
        found = processor(images=[problem.image() for problem in problems], return_tensors="pt")
        grid = found["image_grid_thw"][0]
        parts = [{"type": "image"}, {"type": "text", "text": QUESTION.removeprefix("<image>")}]
        chat = [{"role": "user", "content": parts}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        pad, count = "<|image_pad|>", int(grid.prod()) // processor.merge_size**2
        ids = tokenizer(text.replace(pad, pad * count), add_special_tokens=False).input_ids
        pixels = found["pixel_values"].view(len(problems), -1, found["pixel_values"].shape[1])
        return cls(torch.tensor([ids] * len(problems)), pixels, grid, tokenizer.convert_tokens_to_ids(pad))

    def logits(self, model: PreTrainedModel, rows: Tensor, answers: Tensor) -> Tensor:
        """[rows, answer tokens, vocabulary]: of `answers` int64 [rows, answer tokens] to these prompts."""
        tokens = torch.cat([self.tokens[rows], answers], dim=1)[:, :-1]
        inputs: dict[str, Any] = {
            "pixel_values": self.pixel_values[rows].flatten(0, 1),
            "image_grid_thw": self.grid.expand(len(rows), 3),
            "mm_token_type_ids": (tokens == self.image_token_id).int(),
        }
        logits: Tensor = model(tokens, logits_to_keep=answers.shape[1], **inputs).logits
        return logits


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Counting],
    folder: str,
    *,
    plan: WarmStart,
    seed: int,
) -> None:
    """Trains ``model`` in place; the same seed gives the same weights on the same machine."""
    seen = Seen.of(problems, tokenizer, folder)
    right = encode_answers(tokenizer, [problem.answer for problem in problems])
    noisy = encode_answers(tokenizer, [problem.noisy_answer for problem in problems])
    train_on_mixture(model, functools.partial(seen.logits, model), noisy, right, plan=plan, seed=seed)


@torch.no_grad()
def greedy_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Counting], folder: str
) -> float:
    """The fraction of pictures whose greedy answer is right, in the right format and complete."""
    seen, right = Seen.of(problems, tokenizer, folder), encode_answers(tokenizer, [one.answer for one in problems])
    predicted = seen.logits(model, torch.arange(len(problems)), right).argmax(dim=-1)
    return (predicted == right).all(dim=1).float().mean().item()
