"""The tiny task of vision: squares of a picture, or of a film, to count, with the SFT warm start that teaches it.

Pictures: two rows of three fields, each empty or with a red or blue square; a field is one token of the model, and no
eval picture is in train. The wrong answer overlooks blue squares. A model that does not see the picture is right for
fewer than half of them. A film shows the columns of a picture one after another: a model has to count over its frames.
In a conversation of several turns the model is shown a half of the picture after an answer, and asked again
(examples/look_again.py); each answer is the number of squares of the whole picture.

What `tasks` says about splits, the warm start and its two answers holds here, too.
"""

from __future__ import annotations

import base64
import functools
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from slimrl.tiny.tasks import WarmStart, encode_answers, train_on_mixture

if TYPE_CHECKING:
    import PIL.Image

ROWS, COLUMNS = 2, 3
FIELD = 28  # pixels of a side
EMPTY, RED, BLUE = range(3)
QUESTION = "squares?"
AGAIN = "\n<|im_start|>user\n<image>again?<|im_end|>\n<|im_start|>assistant\n"  # with a half of the picture
BLUE_SHARE = 0.6  # of pictures with a blue square
FRAMES_PER_SECOND = 2  # as models sample them; a column is shown for a second, which is one patch in time


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
        import PIL.Image

        pixels = np.zeros((ROWS * FIELD, COLUMNS * FIELD, 3), np.uint8)
        for place, (field, brightness) in enumerate(zip(self.fields, self.brightness, strict=True)):
            top, left = place // COLUMNS * FIELD + 4, place % COLUMNS * FIELD + 4
            if field != EMPTY:
                pixels[top : top + FIELD - 8, left : left + FIELD - 8, 0 if field == RED else 2] = brightness
        return PIL.Image.fromarray(pixels)

    def halves(self) -> list[PIL.Image.Image]:
        """Its left and its right half, in the size of the whole."""
        whole = self.image()
        middle = whole.width // 2
        parts = ((0, 0, middle, whole.height), (middle, 0, 2 * middle, whole.height))
        return [whole.crop(part).resize(whole.size) for part in parts]

    def row(self) -> dict[str, object]:
        """The line of a jsonl file: messages under ``prompt``, the answer under ``label``, a data URI in ``images``."""
        buffer = io.BytesIO()
        self.image().save(buffer, "PNG")
        return self._row("image", "images", "data:image/png", buffer.getvalue())

    def film(self) -> list[PIL.Image.Image]:
        """56 x 56 pixels: the left half of a frame is the column of that second, the right half is empty."""
        import PIL.Image

        frames = [PIL.Image.new("RGB", (2 * FIELD, ROWS * FIELD)) for _ in range(COLUMNS)]
        for column, frame in enumerate(frames):
            frame.paste(self.image().crop((column * FIELD, 0, (column + 1) * FIELD, ROWS * FIELD)))
        return [frame for frame in frames for _ in range(FRAMES_PER_SECOND)]

    def film_row(self) -> dict[str, object]:
        """As `row`, with the film as an mp4 file in ``videos``."""
        import av

        buffer, frames = io.BytesIO(), self.film()
        with av.open(buffer, "w", format="mp4") as container:
            stream = container.add_stream("libx264", rate=FRAMES_PER_SECOND, options={"threads": "1"})
            stream.width, stream.height, stream.pix_fmt = *frames[0].size, "yuv420p"
            for frame in [*map(av.VideoFrame.from_image, frames), None]:  # None: the last packets
                container.mux(stream.encode(frame))
        return self._row("video", "videos", "data:video/mp4", buffer.getvalue())

    def _row(self, kind: str, column: str, uri: str, data: bytes) -> dict[str, object]:
        prompt = [{"role": "user", "content": f"<{kind}>{QUESTION}"}]
        return {
            "prompt": prompt,
            "label": str(self.answer),
            column: [f"{uri};base64,{base64.b64encode(data).decode()}"],
        }


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
    """Prompts with their pictures or films, and what follows until the last answer; as transformers' model takes them.

    The texts of all prompts are equal.
    """

    texts: tuple[Tensor, ...]  # int64 [tokens]: before each answer
    kinds: tuple[Tensor, ...]  # int64 [tokens] of each: 1 for those of an image, 2 of a video, 0 of text
    pixel_values: Tensor  # float32 [prompts, patches, values]
    others: dict[str, Tensor]  # of one prompt, as of every other: the grids, and of a film its seconds

    @classmethod
    def of(
        cls,
        problems: Sequence[Counting],
        tokenizer: PreTrainedTokenizerFast,
        folder: str,
        *,
        films: bool = False,
        turns: int = 1,
    ) -> Seen:
        """The prompts after the chat template, with the processors in `folder`."""
        kind = "video" if films else "image"
        chat = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": QUESTION}]}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        image = "<|vision_start|><|image_pad|><|vision_end|>"
        written = [prompt, *[AGAIN.replace("<image>", image)] * (turns - 1)]
        pixels, others, own = (
            _film_inputs(problems, tokenizer, folder) if films else _picture_inputs(problems, tokenizer, folder, turns)
        )
        pad: Any = tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>")
        texts = []
        for text in written:
            ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
            texts.append(torch.tensor([*ids[: ids.index(pad)], *own, *ids[ids.index(pad) + 1 :]]))
        kinds = tuple((text == pad).long() * (2 if films else 1) for text in texts)
        return cls(tuple(texts), kinds, pixels.view(len(problems), -1, pixels.shape[-1]), others)

    def logits(self, model: PreTrainedModel, rows: Tensor, answers: Tensor) -> Tensor:
        """[rows, answer tokens, vocabulary]: of `answers` int64 [rows, answer tokens], of all turns end to end."""
        tokens, kinds, places, length = [], [], [], 0
        for text, kind, answer in zip(self.texts, self.kinds, answers.chunk(len(self.texts), dim=1), strict=True):
            tokens += [text.expand(len(rows), -1), answer]
            kinds += [kind, kind.new_zeros(answer.shape[1])]
            length += len(text) + answer.shape[1]
            places.append(torch.arange(length - answer.shape[1], length) - 1)  # a token's logits are those before it
        inputs: dict[str, Any] = {
            name: value.repeat(len(rows), *[1] * (value.ndim - 1)) for name, value in self.others.items()
        }
        inputs["pixel_values_videos" if 2 in kinds[0] else "pixel_values"] = self.pixel_values[rows].flatten(0, 1)
        inputs["mm_token_type_ids"] = torch.cat(kinds)[:-1].int().expand(len(rows), -1)
        logits: Tensor = model(torch.cat(tokens, dim=1)[:, :-1], logits_to_keep=torch.cat(places), **inputs).logits
        return logits


# patches of all prompts, the inputs that are the same for each prompt, and the tokens of one picture or film
_Inputs: TypeAlias = tuple[Tensor, dict[str, Tensor], list[int]]


def _picture_inputs(
    problems: Sequence[Counting], tokenizer: PreTrainedTokenizerFast, folder: str, turns: int
) -> _Inputs:
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder)
    shown = [image for problem in problems for image in [problem.image(), *problem.halves()[: turns - 1]]]
    found = processor(images=shown, return_tensors="pt")
    grids, pad = found["image_grid_thw"][:turns], tokenizer.convert_tokens_to_ids("<|image_pad|>")
    return found["pixel_values"], {"image_grid_thw": grids}, [pad] * (int(grids[0].prod()) // processor.merge_size**2)


def _film_inputs(problems: Sequence[Counting], tokenizer: PreTrainedTokenizerFast, folder: str) -> _Inputs:
    """No codec is between; transformers' own processor needs torchvision."""
    from slimrl.rollout.dataset.images import data_uri
    from slimrl.rollout.dataset.videos import Video, VideoProcessor

    processor = VideoProcessor(folder)
    times = tuple(number / FRAMES_PER_SECOND for number in range(COLUMNS * FRAMES_PER_SECOND))
    height, width = processor.frames.size(len(times), ROWS * FIELD, 2 * FIELD)
    shown = [[data_uri(frame.resize((width, height))) for frame in problem.film()] for problem in problems]
    films = [Video(tuple(frames), FRAMES_PER_SECOND, times) for frames in shown]
    pixels = processor.train_inputs(films)["pixel_values_videos"]
    return pixels, processor.grids(films[:1]), processor.token_ids(films[0], tokenizer)


def warm_start_on_pictures(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Counting],
    folder: str,
    *,
    plan: WarmStart,
    seed: int,
    films: bool = False,
    turns: int = 1,
) -> None:
    """Trains ``model`` in place; the same seed gives the same weights on the same machine."""
    seen = Seen.of(problems, tokenizer, folder, films=films, turns=turns)
    right = encode_answers(tokenizer, [problem.answer for problem in problems]).repeat(1, turns)
    noisy = encode_answers(tokenizer, [problem.noisy_answer for problem in problems]).repeat(1, turns)
    train_on_mixture(model, functools.partial(seen.logits, model), noisy, right, plan=plan, seed=seed)


@torch.no_grad()
def greedy_accuracy_on_pictures(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Counting],
    folder: str,
    *,
    films: bool = False,
    turns: int = 1,
) -> float:
    """The fraction of pictures, or films, of which all greedy answers are right, in the right format and complete."""
    seen = Seen.of(problems, tokenizer, folder, films=films, turns=turns)
    right = encode_answers(tokenizer, [one.answer for one in problems]).repeat(1, turns)
    predicted = seen.logits(model, torch.arange(len(problems)), right).argmax(dim=-1)
    return (predicted == right).all(dim=1).float().mean().item()
